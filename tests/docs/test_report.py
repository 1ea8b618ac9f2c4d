"""The page of all committed measurements: complete in itself, and made of the results files alone."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("matplotlib")


class _Parts(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "src", "xlink:href"):
                self.links.append(value or "")


def test_report_is_one_page_without_resources(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    subprocess.run([sys.executable, str(ROOT / "scripts" / "report.py"), str(file)], check=True, timeout=120)
    text = file.read_text(encoding="utf-8")
    parts = _Parts()
    parts.feed(text)
    assert parts.tags.count("svg") == parts.tags.count("h2") - 1 == 8
    assert all(link.startswith("#") for link in parts.links) and "url(http" not in text and "<script" not in text
    own = {
        value for value in parts.ids if value.startswith(("m", "p"))
    }  # markers and clip paths, which are referred to
    assert {link[1:] for link in parts.links} <= set(parts.ids) and own
    assert "#010203" not in text and "currentColor" in text and "prefers-color-scheme: dark" in text
    rows = json.loads((ROOT / "benchmarks/results/h200/serve.json").read_text())["rows"]
    one = next(row for row in rows if row["kernel"] == "native" and row.get("subject") == "decode" and row["m"] == 1)
    assert f"<td>{one['tokens_per_second']:,.1f}</td>" in text
    for name in (
        "vllm-exl3",
        "exllamav3",
        "Marlin int4",
        "cuBLAS bf16",
        "fp8, FlashAttention 3",
        "avx512_vbmi",
        "GGUF",
    ):
        assert re.search(rf">{re.escape(name)}<", text), name
    assert str(ROOT) not in text
