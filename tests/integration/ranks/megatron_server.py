"""The server of ranks, which has imported Megatron-Core as well: that takes each rank many seconds."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from integration.ranks import server

MODULES = (
    "megatron.core.dist_checkpointing.optimizer",
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer.cpu_offloading",
    "megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer",
    "megatron.core.transformer.fsdp_dtensor_checkpoint",
)

if __name__ == "__main__":
    server._MODULES = (*server._MODULES, *MODULES)  # type: ignore[assignment]
    server.main()
