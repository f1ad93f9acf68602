"""Adapters to frameworks, one file each; a framework is imported by its own adapter and by nothing else."""
