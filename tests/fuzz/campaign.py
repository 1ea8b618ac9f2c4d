"""Open damaged packs until told to stop, and count what becomes of them. `make fuzz` runs it; it resumes.

    python -m tests.fuzz.campaign --cases 1000000 --state .cache/fuzz/pack.json

Every case must end in a pack or in `Exl3PackError`, within seconds. One that does not is kept by its number in the
state, and the run goes on; the exit status is 1 then. Add such numbers to ``seeds.json``, which the tests replay.
"""

import argparse
import json
import os
import resource
import shutil
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from tests.fuzz.mutations import Files, mutate
from tests.tiny_pack import llama
from vllm_exl3.pack import Exl3PackError, Pack
from vllm_exl3.pack.check import check
from vllm_exl3.plan.survey import survey

__all__ = ["SEEDS", "Campaign", "main", "whole_pack"]

SEEDS = Path(__file__).with_name("seeds.json")
"""Numbers that once found something."""

_SLOW = 5.0
"""Seconds of this thread's time after which a case counts as stuck."""


def whole_pack(folder: Path) -> Files:
    """The bytes of a small sound pack with every kind of metadata."""
    draft = llama(layers=3)
    written = draft.write(folder)
    index = {"metadata": {}, "weight_map": dict.fromkeys(draft.tensors, "model.safetensors")}
    (written / "model.safetensors.index.json").write_text(json.dumps(index))
    return {path.name: path.read_bytes() for path in written.iterdir()}


class Campaign:
    """Cases, one after the other.

    Args:
        folder: where packs are written, one over the other.

    Attributes:
        ends: what became of cases, by damage and by end.
        found: numbers of cases that ended otherwise than they may, with what happened.
    """

    def __init__(self, folder: Path) -> None:
        self._files = whole_pack(folder / "whole")
        self._place = folder / "damaged"
        self.ends: Counter[str] = Counter()
        self.found: dict[int, str] = {}

    def case(self, number: int) -> str:
        """Open the pack that a number stands for, and say what became of it."""
        name, files = mutate(self._files, number)
        shutil.rmtree(self._place, ignore_errors=True)
        self._place.mkdir()
        for file, data in files.items():
            (self._place / file).write_bytes(data)
        before = _thread_seconds()
        try:
            end = self._look(thoroughly=number % 16 == 0)
        except Exception:
            end = "found"
            self.found[number] = traceback.format_exc(limit=-3)
        if (taken := _thread_seconds() - before) > _SLOW:
            end = "found"
            self.found[number] = f"{taken:.1f} s"
        self.ends[f"{name}: {end}"] += 1
        return end

    def _look(self, *, thoroughly: bool) -> str:
        """Open the pack and describe it; thoroughly, check it as vLLM has it checked, too."""
        try:
            pack = Pack.open(self._place)
            found = survey(pack)
            json.dumps(found)
            if thoroughly:
                check(pack)
            return "refused" if found["faults"] else "warned" if found["warnings"] else "sound"
        except Exl3PackError as error:
            error.report().encode()
            if not all(error.parts().values()):
                raise AssertionError(f"an error without words: {error.parts()}") from error
            return "refused"


def _thread_seconds() -> float:
    """Of this thread, without the kernel's: on a machine short of memory, that reclaims pages for seconds."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_utime


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="campaign.py", description="Open damaged packs and count what becomes of them."
    )
    parser.add_argument("--cases", type=int, default=1_000_000, help="how many in all, over every run")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this long")
    parser.add_argument("--state", type=Path, default=Path(".cache/fuzz/pack.json"), help="where the run resumes from")
    return parser.parse_args()


def main() -> int:
    """Resume the campaign; the exit status is 1 once something was found."""
    arguments = _parse()
    state: dict[str, Any] = {"next": 0, "cpu_seconds": 0.0, "ends": {}, "found": {}}
    if arguments.state.exists():
        state = json.loads(arguments.state.read_text())
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        campaign = Campaign(Path(folder))
        campaign.ends.update(state["ends"])
        campaign.found.update({int(number): what for number, what in state["found"].items()})
        used = float(state["cpu_seconds"])
        number, begin, saved = int(state["next"]), time.monotonic(), time.monotonic()
        try:
            while number < arguments.cases and time.monotonic() - begin < arguments.seconds:
                campaign.case(number)
                number += 1
                if time.monotonic() - saved > 10:
                    saved = time.monotonic()
                    _save(arguments.state, campaign, number, used + time.process_time())
                    print(f"{number} cases, {len(campaign.found)} found", flush=True)
        finally:
            _save(arguments.state, campaign, number, used + time.process_time())
    for end, count in sorted(campaign.ends.items()):
        print(f"{count:9d}  {end}")
    for case, what in campaign.found.items():
        print(f"case {case}: {what}")
    return 1 if campaign.found else 0


def _save(path: Path, campaign: Campaign, number: int, cpu_seconds: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {
        "next": number,
        "cpu_seconds": round(cpu_seconds),
        "ends": dict(sorted(campaign.ends.items())),
        "found": campaign.found,
    }
    part = path.with_suffix(".part")
    part.write_text(json.dumps(state, indent=1))
    part.replace(path)


if __name__ == "__main__":
    raise SystemExit(main())
