"""Damaged packs through vLLM's loading, in this process: refused, warned of, equal in their logits, or silent.

    python -m tests.fuzz.loader --cases 20000 --state .cache/fuzz/loader.json

A number stands for a damaged pack. Those that opening refuses, as vLLM has it checked, are counted and cost little; the
others are loaded by vLLM. What differs from the undamaged pack without a word is counted by the kind of damage, unless
`vllm-exl3 verify` reports it. An exception that this package raises without words is kept by its number and ends with
exit status 1, as does a process that died.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from tests.fuzz.mutations import MUTATIONS, Files
from tests.fuzz.plausible import PLAUSIBLE
from tests.tiny_pack import llama
from vllm_exl3.pack import Exl3PackError, Pack
from vllm_exl3.pack.check import check

__all__ = ["Loading", "damaged", "reported_by_verify", "whole_pack"]

KINDS = {**MUTATIONS, **PLAUSIBLE}
_OURS = f"{os.sep}vllm_exl3{os.sep}"
_SECONDS = 20.0
"""Seconds of this process' time after which a case counts as stuck."""


def whole_pack(folder: Path) -> Files:
    """The bytes of a sound pack of which every tensor matters, with all metadata."""
    draft = llama(layers=4)
    chance = np.random.default_rng(0)
    for name, (dtype, values) in draft.tensors.items():
        if dtype == "F16" and name.endswith(".weight"):
            draft.tensors[name] = (dtype, chance.standard_normal(values.shape) / 4 + ("norm" in name))
    written = draft.write(folder)
    index = {"metadata": {}, "weight_map": dict.fromkeys(draft.tensors, "model.safetensors")}
    (written / "model.safetensors.index.json").write_text(json.dumps(index))
    return {path.name: path.read_bytes() for path in written.iterdir()}


def damaged(files: Files, number: int) -> tuple[str, Files]:
    """The damaged pack that a number stands for, and the name of the damage; two of three are plausible ones."""
    chance = random.Random(number)
    name = chance.choice(sorted(PLAUSIBLE if number % 3 else MUTATIONS))
    changed = dict(files)
    KINDS[name](changed, chance)
    return name, changed


def reported_by_verify(folder: Path) -> bool:
    """True if `vllm-exl3 verify` finds fault with a pack."""
    command = [sys.executable, "-m", "vllm_exl3", "verify", str(folder)]
    return subprocess.run(command, capture_output=True, check=False).returncode != 0


class Loading:
    """Cases, one after the other.

    Args:
        folder: where packs are written, one over the other.

    Attributes:
        ends: what became of cases, by damage and by end.
        found: numbers of cases that ended otherwise than they may, with what happened.
        loaded: how many vLLM has begun to load.
    """

    def __init__(self, folder: Path) -> None:
        from tests.fuzz.in_process import Loader

        self._files = whole_pack(folder / "whole")
        self._place = folder / "damaged"
        self._loader = Loader()
        self._expected = self._loader.logits(folder / "whole")
        self._usual = {str(warning) for warning in check(Pack.open(folder / "whole"))}
        again = self._loader.logits(folder / "whole")
        assert self._expected.equal(again) and bool(self._expected.isfinite().all()) and self._expected.std() > 0
        self.ends: Counter[str] = Counter()
        self.found: dict[int, str] = {}
        self.loaded = 0

    def case(self, number: int) -> str:
        """Load the pack that a number stands for, and say what became of it."""
        name, files = damaged(self._files, number)
        shutil.rmtree(self._place, ignore_errors=True)
        self._place.mkdir()
        for file, data in files.items():
            (self._place / file).write_bytes(data)
        before = time.process_time()
        try:
            end = "unchanged" if files == self._files else self._end()
        except Exl3PackError as error:
            end = "refused" if all(error.parts().values()) else self._keep(number)
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            ours = bool(frames) and _OURS in frames[-1].filename
            told = "Exl3PackError" in "".join(traceback.format_exception(error)) or _in_words(error)
            end = self._keep(number) if ours else ("refused" if told else "vLLM: refused")
        if (taken := time.process_time() - before) > _SECONDS:
            end = "found"
            self.found[number] = f"{taken:.1f} s"
        self.ends[f"{name}: {end}"] += 1
        return end

    def _keep(self, number: int) -> str:
        self.found[number] = traceback.format_exc(limit=-4)
        return "found"

    def _end(self) -> str:
        warnings = {str(warning) for warning in check(Pack.open(self._place))}
        self.loaded += 1
        logits = self._loader.logits(self._place)
        if logits.shape == self._expected.shape and logits.equal(self._expected):
            return "equal"
        if not logits.isfinite().all():
            return "not finite"
        if warnings - self._usual:
            return "warned"
        return "reported by verify" if reported_by_verify(self._place) else "silent"


def _in_words(error: BaseException) -> bool:
    """True if the configuration was refused by this package inside pydantic's validation."""
    return "vllm-exl3" in str(error) or "EXL3" in str(error)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="loader.py", description="Load damaged packs and count what becomes of them.")
    parser.add_argument("--cases", type=int, default=20_000, help="how many in all, over every run")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this long")
    parser.add_argument(
        "--state", type=Path, default=Path(".cache/fuzz/loader.json"), help="where the run resumes from"
    )
    return parser.parse_args()


def main() -> int:
    """Resume the campaign; the exit status is 1 once something was found."""
    import torch

    arguments = _parse()
    torch.set_num_threads(1)
    state: dict[str, Any] = {"next": 0, "loaded": 0, "cpu_seconds": 0.0, "ends": {}, "found": {}}
    if arguments.state.exists():
        state = json.loads(arguments.state.read_text())
    begun = arguments.state.with_suffix(".begun")
    if begun.exists():  # the case during which the process died
        state["found"][begun.read_text()] = "the process ended"
        state["next"] = int(begun.read_text()) + 1
    arguments.state.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        campaign = Loading(Path(folder))
        campaign.ends.update(state["ends"])
        campaign.found.update({int(number): what for number, what in state["found"].items()})
        campaign.loaded = state["loaded"]
        number, used, begin, saved = state["next"], state["cpu_seconds"], time.monotonic(), time.monotonic()

        def save() -> None:
            kept = {"next": number, "loaded": campaign.loaded, "cpu_seconds": round(used + time.process_time())}
            text = json.dumps({**kept, "ends": dict(sorted(campaign.ends.items())), "found": campaign.found}, indent=1)
            arguments.state.with_suffix(".part").write_text(text)
            arguments.state.with_suffix(".part").replace(arguments.state)

        try:
            while number < arguments.cases and time.monotonic() - begin < arguments.seconds:
                begun.write_text(str(number))
                campaign.case(number)
                number += 1
                if time.monotonic() - saved > 10:
                    saved = time.monotonic()
                    save()
                    print(f"{number} cases, {campaign.loaded} loaded, {len(campaign.found)} found", flush=True)
        finally:  # Ctrl-C, too; only a process that dies leaves it
            begun.unlink(missing_ok=True)
            save()
    for end, count in sorted(campaign.ends.items()):
        print(f"{count:9d}  {end}")
    for case, what in campaign.found.items():
        print(f"case {case}: {what}")
    return 1 if campaign.found else 0


if __name__ == "__main__":
    raise SystemExit(main())
