import json
from argparse import Namespace
from pathlib import Path

import pytest

from tests.unit.test_report import results  # noqa: F401 (a fixture)
from yardstick.cli.record_run import main
from yardstick.errors import YardstickError
from yardstick.files import write_json

TABLE = """# Fidelity

## m

| candidate | x |
| --- | ---: |
| *noise-hf* | 1 |
| `good` (baseline) | 2 |
| `bad` | 3 |
"""


@pytest.fixture
def run(results):  # noqa: F811
    """A finished run with a README, and the command on it."""
    (results / "table.md").write_text(TABLE)
    (results / "quantization.md").write_text("# Record\n")
    (results / "plots").mkdir()
    (results / "plots" / "a.png").write_bytes(b"x")
    made = {"recipe": {"kind": "made", "tool": "autoround"}, "versions": {"auto-round": "0.16.1", "numpy": "1"}}
    write_json(results / "m" / "good" / "quantize.json", made)
    write_json(results / "m" / "bad" / "quantize.json", {"recipe": {"method": "rtn"}, "versions": {"torch": "1"}})
    readme = results / "README.md"
    readme.write_text("before\n<!-- table: begin -->\nold\n<!-- table: end -->\nafter\n")

    def command(**settings):
        paths = {"readme": None, "figures": None} | settings
        main(Namespace(results=results, output=results / "kept", cores=2, **paths))
        return results

    return command


def test_table_record_and_plots_are_kept_with_the_versions_of_tools(run):
    kept = run() / "kept"
    for name, content in (("table.md", TABLE), ("quantization.md", "# Record\n")):
        text = (kept / name).read_text()
        assert text.startswith(content) and "auto-round 0.16.1." in text and "2 cores" in text
    assert (kept / "plots" / "a.png").read_bytes() == b"x"
    assert "old" in (kept.parent / "README.md").read_text()  # not asked for


def test_the_readme_takes_the_table(run, tmp_path):
    text = (run(readme=tmp_path / "README.md") / "README.md").read_text()
    assert text.startswith("before\n<!-- table: begin -->\n### m\n") and text.endswith("<!-- table: end -->\nafter\n")
    assert "| `good` (baseline) | 2 |" in text and "old" not in text


def test_figures_are_those_of_the_summaries(run, tmp_path):
    run(figures=tmp_path / "figures.json")
    content = json.loads((tmp_path / "figures.json").read_text())
    summary = json.loads((tmp_path / "m" / "good" / "summary.json").read_text())
    # the failed row has none, and a noise floor is not to be compared
    assert content["candidates"] == {
        "good": {"bits_per_weight.all": 4.25, "kl.mean": round(summary["kl"]["mean"], 6), "top1": summary["top1"]}
    }
    (tmp_path / "table.md").write_text(TABLE + TABLE.replace("## m", "## other"))
    with pytest.raises(YardstickError, match="figures are kept of one model, these are of m, other"):
        run(figures=tmp_path / "figures.json")


def test_a_run_that_is_not_finished_is_refused(run, tmp_path):
    Path(tmp_path / "table.md").unlink()
    with pytest.raises(YardstickError, match="table.md: no such file; run the experiment first"):
        run()
