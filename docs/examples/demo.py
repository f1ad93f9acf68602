"""Kill a training job in the middle of a save, resume it, and show that nothing was lost.

    python docs/examples/demo.py [--dist-ckpt-workers N] [--out DIR]

Three runs of `train.py`, with two ranks each:

1. a run that nobody interrupts and that never saves: its losses are the reference;
2. a run that saves while it trains, until SIGKILL ends all of its processes in the middle of a save;
3. a run that resumes from the newest complete checkpoint and goes on to the last step.

The last page compares the losses bit for bit and reads the last checkpoint with torch's own reader, in a
process where distckpt cannot be imported. The exit status is 1 if anything differs or fails, and no process
outlives the demo.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import psutil

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

HERE = Path(__file__).resolve().parent
NUM_RANKS = 2
STEPS = 24
SAVE_EVERY = 6
MAX_KILLS = 3
RUN_TIMEOUT_S = 300.0
READ_TIMEOUT_S = 120.0
END_TIMEOUT_S = 20.0
FREE_BYTES = 1 << 30
MIB = 1 << 20
PR_SET_CHILD_SUBREAPER = 36  # Source: linux/prctl.h


class DemoError(Exception):
    """The demo cannot go on; the message says why."""


@dataclass(frozen=True, slots=True)
class Kill:
    """What was on storage at the moment when every process of the job was dead.

    Attributes:
        step: The step whose save was under way.
        resume_step: The step of the newest complete checkpoint.
        num_processes: How many processes SIGKILL ended.
        files: Name and size in bytes of each data file of the partial checkpoint.
        full_bytes: Size of the data files of a complete checkpoint.
    """

    step: int
    resume_step: int
    num_processes: int
    files: tuple[tuple[str, int], ...]
    full_bytes: int


class Job:
    """One run of `train.py` under torchrun; what it prints is shown and goes to a log."""

    def __init__(
        self, name: str, run: Path, *, save_every: int, resume: bool = False, workers: int | None
    ) -> None:
        self.name = name
        self.log = run.with_name(f"{name}.log")
        self.deadline_s = time.monotonic() + RUN_TIMEOUT_S
        command = [sys.executable, "-m", "torch.distributed.run"]
        command += ["--standalone", f"--nproc-per-node={NUM_RANKS}"]
        command += [str(HERE / "train.py"), f"--out={run}", f"--steps={STEPS}", f"--save-every={save_every}"]
        command += ["--resume"] * resume
        command += [f"--dist-ckpt-workers={workers}"] * (workers is not None)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with self.log.open("wb") as errors:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._echo = threading.Thread(target=self._show, daemon=True)
        self._echo.start()

    def _show(self) -> None:
        """Show each line of the job's output, until the last of its processes has ended."""
        assert self.process.stdout is not None
        with self.log.open("a") as log:
            for line in self.process.stdout:
                say(f"  {self.name:13} | {line.rstrip()}")
                log.write(line)

    def has_ended(self) -> bool:
        """Return whether the job has ended well.

        Raises:
            DemoError: If it failed, or its deadline has passed.
        """
        status = self.process.poll()
        if status not in (None, 0):
            raise DemoError(f"the {self.name} run ended with status {status}\n{self.tail()}")
        if time.monotonic() > self.deadline_s:
            raise DemoError(f"the {self.name} run is late after {RUN_TIMEOUT_S:.0f} s\n{self.tail()}")
        return status == 0

    def wait(self) -> None:
        """Wait until the job has ended and left no process behind.

        Raises:
            DemoError: If it failed, took too long, or left a process behind.
        """
        while not self.has_ended():
            time.sleep(0.05)
        deadline_s = time.monotonic() + END_TIMEOUT_S
        while left := living_descendants():
            if time.monotonic() > deadline_s:
                raise DemoError(f"processes of the {self.name} run outlive it: {left}")
            time.sleep(0.05)
        self._echo.join(END_TIMEOUT_S)

    def kill(self) -> int:
        """End every process of the job with SIGKILL; return how many there were."""
        num_processes = kill_descendants()
        self.process.poll()
        self._echo.join(END_TIMEOUT_S)
        return num_processes

    def tail(self) -> str:
        """Return the end of the log, for an error message."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join([f"the end of {self.log}:", *(f"  {line}" for line in lines[-100:])])


def say(line: str = "") -> None:
    """Print one line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def adopt_orphans() -> None:
    """Make every orphan below this process its child, so that none can escape `kill_descendants`."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def living_descendants() -> list[psutil.Process]:
    """Return the processes below this one that run, and reap those of its children that have ended."""
    living = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
            if process.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(process.pid, os.WNOHANG)
            else:
                living.append(process)
    return living


def kill_descendants() -> int:
    """End every process below this one with SIGKILL and reap it; return how many there were.

    Raises:
        DemoError: If one does not end.
    """
    killed = set()
    deadline_s = time.monotonic() + END_TIMEOUT_S
    while time.monotonic() < deadline_s:
        for process in living_descendants():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
                killed.add(process.pid)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return len(killed)
        time.sleep(0.01)
    raise DemoError(f"these processes do not end after SIGKILL: {living_descendants()}")


def checkpoint_directory(run: Path, step: int) -> Path:
    """Return where `train.py` puts the checkpoint of `step`."""
    return run / "checkpoints" / f"step-{step:06}"


def is_complete(checkpoint: Path) -> bool:
    """Return whether the checkpoint has its `.metadata`, which is published last and in one atomic step."""
    return (checkpoint / ".metadata").is_file()


def data_files(checkpoint: Path) -> tuple[tuple[str, int], ...]:
    """Return name and size in bytes of each data file."""
    files = []
    for path in sorted(checkpoint.glob("__*")):
        with contextlib.suppress(FileNotFoundError):
            files.append((path.name, path.stat().st_size))
    return tuple(files)


def total_bytes(files: Sequence[tuple[str, int]]) -> int:
    """Return the sum of the sizes."""
    return sum(nbytes for _, nbytes in files)


def read_losses(run: Path) -> dict[int, float]:
    """Return the recorded loss of each step; a last line that the kill cut short does not count."""
    losses = {}
    for line in (run / "losses.jsonl").read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            record = json.loads(line)
            losses[record["step"]] = record["loss"]
    return losses


def float_bits(loss: float) -> str:
    """Return the 32 bits of a float32 as eight hexadecimal digits."""
    return struct.pack(">f", loss).hex()


def wait_for_middle_of_save(job: Job, run: Path, steps: Sequence[int]) -> int | None:
    """Return in the middle of one of the saves: half of its bytes are on storage, but its `.metadata` is not.

    Args:
        job: The run that saves.
        run: The run's directory.
        steps: Which saves to watch; the next one is taken when one ends unseen.

    Returns:
        The step of the save, or None if all of them ended unseen.
    """
    while not is_complete(checkpoint_directory(run, steps[0] - SAVE_EVERY)) and not job.has_ended():
        time.sleep(0.01)
    full_bytes = total_bytes(data_files(checkpoint_directory(run, steps[0] - SAVE_EVERY)))
    for step in steps:
        checkpoint = checkpoint_directory(run, step)
        while not is_complete(checkpoint) and not job.has_ended():
            if total_bytes(data_files(checkpoint)) >= full_bytes // 2:
                return step
            time.sleep(0.001)
        say(f"  the save of step {step} ended before it was seen; the next one is watched")
    return None


def kill_in_the_middle_of_a_save(run: Path, workers: int | None) -> Kill:
    """Run the training until a save is half done, kill it, and make sure that the save was not complete.

    Raises:
        DemoError: If the save was complete each time.
    """
    for attempt in range(1, MAX_KILLS + 1):
        shutil.rmtree(run, ignore_errors=True)
        job = Job("killed", run, save_every=SAVE_EVERY, workers=workers)
        step = wait_for_middle_of_save(job, run, range(2 * SAVE_EVERY, STEPS + 1, SAVE_EVERY))
        num_processes = job.kill()
        if step is None:
            say(f"  attempt {attempt}: no save was seen in its middle")
            continue
        checkpoint = checkpoint_directory(run, step)
        if is_complete(checkpoint):
            say(f"  attempt {attempt}: the save of step {step} was complete before the kill; once more")
            continue
        files, full_files = data_files(checkpoint), data_files(checkpoint_directory(run, step - SAVE_EVERY))
        kill = Kill(step, step - SAVE_EVERY, num_processes, files, total_bytes(full_files))
        say(
            f"  SIGKILL to {num_processes} processes in the middle of the save of step {step}: "
            f"{describe(kill.files)} of {kill.full_bytes / MIB:.1f} MiB on storage, .metadata absent"
        )
        return kill
    raise DemoError(f"in {MAX_KILLS} attempts no kill came in the middle of a save")


def describe(files: Sequence[tuple[str, int]]) -> str:
    """Return the number of the files and their size in words."""
    return f"{len(files)} data file{'s' * (len(files) != 1)}, {total_bytes(files) / MIB:.1f} MiB"


def read_back(reader: str, checkpoint: Path, out: Path) -> dict[str, str]:
    """Read a checkpoint in a process of its own; return the digest of each value by its fqn.

    Raises:
        DemoError: If it cannot be read.
    """
    digests = out / f"digests-{reader}.json"
    script = str(HERE / "read_back.py")
    command = [sys.executable, script, f"--reader={reader}", str(checkpoint), str(digests)]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=READ_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise DemoError(f"the {reader} reader is late after {READ_TIMEOUT_S:.0f} s: {checkpoint}") from error
    if answer.returncode != 0:
        raise DemoError(f"the {reader} reader cannot read {checkpoint}\n{answer.stderr[-4000:]}")
    found: dict[str, str] = json.loads(digests.read_text())
    return found


def show_losses(reference: dict[int, float], killed: dict[int, float], resumed: dict[int, float]) -> bool:
    """Print the losses side by side and return whether they are equal, bit for bit."""

    def cell(losses: dict[int, float], step: int) -> str:
        return f"{losses[step]:.6f} {float_bits(losses[step])}" if step in losses else "-"

    say(f"  {'step':>4}  {'uninterrupted':20}{'killed':20}resumed")
    for step in range(min(resumed), STEPS + 1):
        say(f"  {step:4}  {cell(reference, step):20}{cell(killed, step):20}{cell(resumed, step):20}".rstrip())
    different = {
        step
        for losses in (killed, resumed)
        for step, loss in losses.items()
        if step not in reference or float_bits(loss) != float_bits(reference[step])
    }
    different |= set(range(1, STEPS + 1)) - reference.keys()
    different |= set(range(min(resumed), STEPS + 1)) - resumed.keys()
    say(f"  equal, bit for bit: {f'NO, not at the steps {sorted(different)}' if different else 'yes'}")
    say(f"  ({len(killed)} steps of the killed and {len(resumed)} of the resumed run were compared)")
    return not different


def show_checkpoints(run: Path, kill: Kill) -> None:
    """Print where the last checkpoint lies, and what the kill left behind."""
    last = checkpoint_directory(run, STEPS)
    say(f"  {last}")
    for path in sorted(path for path in last.rglob("*") if path.is_file()):
        say(f"    {path.stat().st_size:12,} bytes  {path.relative_to(last)}")
    say()
    say(f"What the kill left behind: the save of step {kill.step}")
    for name, nbytes in kill.files:
        say(f"    {nbytes:12,} bytes  {name}")
    say(f"  {total_bytes(kill.files) / kill.full_bytes:.0%} of the bytes of a checkpoint, but no .metadata:")
    say(f"  for every reader it did not exist, and the resumed run went on from step {kill.resume_step}.")
    saved_anew = dict(data_files(checkpoint_directory(run, kill.step)))
    left = [name for name, _ in kill.files if name in saved_anew]
    fate = f"did not remove {', '.join(left)}" if left else "removed these files"
    say(f"  At step {kill.step} that run saved anew, in the same directory, and {fate}.")


def show_readers(checkpoint: Path, out: Path) -> bool:
    """Read the checkpoint with both readers, print the outcome, and return whether all values are equal."""
    stock, own = read_back("torch", checkpoint, out), read_back("distckpt", checkpoint, out)
    different = sorted(fqn for fqn in stock.keys() | own.keys() if stock.get(fqn) != own.get(fqn))
    num_tensors = sum("sha256:" in value for value in stock.values())
    say("  torch's FileSystemReader, in a process where distckpt cannot be imported:")
    say(f"  {num_tensors} whole tensors and {len(stock) - num_tensors} other values")
    verdict = f"NO: {', '.join(different)}" if different else "yes"
    say(f"  equal to what distckpt's reader gives, bit for bit: {verdict}")
    return bool(stock) and not different


def run_demo(out: Path, workers: int | None) -> bool:
    """Make the three runs below `out`, print the last page, and return whether everything is equal.

    Raises:
        DemoError: If a run fails or the resumed run does not start where it should.
    """
    start_s = time.monotonic()
    reference, run = out / "uninterrupted", out / "interrupted"
    say(f"1. {STEPS} steps that nobody interrupts, without a single save")
    Job("uninterrupted", reference, save_every=0, workers=workers).wait()
    say(f"2. The same with a save every {SAVE_EVERY} steps, killed in the middle of one")
    kill = kill_in_the_middle_of_a_save(run, workers)
    # The resumed run goes on in the same directory, as a real job would; only the losses are kept apart.
    killed_losses = read_losses(run)
    (run / "losses.jsonl").rename(run / "losses-killed.jsonl")
    say("3. The killed run resumed from the newest complete checkpoint")
    Job("resumed", run, save_every=SAVE_EVERY, resume=True, workers=workers).wait()
    resumed_losses = read_losses(run)
    first_step = min(resumed_losses, default=None)
    if first_step != kill.resume_step + 1:
        raise DemoError(f"the resumed run began with step {first_step}, not {kill.resume_step + 1}")

    say()
    say(f"Losses after the resume at step {kill.resume_step}, each with the bits of its float32")
    losses_equal = show_losses(read_losses(reference), killed_losses, resumed_losses)
    say()
    say("The last checkpoint")
    show_checkpoints(run, kill)
    say()
    say("The last checkpoint, read by stock PyTorch")
    values_equal = show_readers(checkpoint_directory(run, STEPS), out)
    say()
    say(f"{time.monotonic() - start_s:.0f} s; everything lies in {out}")
    return losses_equal and values_equal


def open_output(path: Path | None) -> Path:
    """Return the directory for the demo's files, made anew.

    Raises:
        DemoError: If it holds files already or too little space is free.
    """
    if path is None:
        path = Path(tempfile.mkdtemp(prefix="distckpt-demo-"))
    path = path.absolute()
    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()):
        raise DemoError(f"{path} is not empty; name a new directory")
    if shutil.disk_usage(path).free < FREE_BYTES:
        raise DemoError(f"{path} has less than {FREE_BYTES / MIB:.0f} MiB free; use --out")
    return path


def exit_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    """Turn a signal into an ordinary exit, so that the clean-up runs.

    Raises:
        SystemExit: Always, with the status that a shell reports for the signal.
    """
    del frame
    raise SystemExit(128 + number)


def main() -> int:
    """Run the demo and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, help="new directory for everything (default: a temporary one)")
    parser.add_argument("--dist-ckpt-workers", type=int, metavar="N", help="passed on to the training")
    args = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, exit_on_signal)
    adopt_orphans()
    try:
        return 0 if run_demo(open_output(args.out), args.dist_ckpt_workers) else 1
    except DemoError as error:
        sys.stderr.write(f"demo: {error}\n")
        return 1
    finally:
        kill_descendants()


if __name__ == "__main__":
    sys.exit(main())
