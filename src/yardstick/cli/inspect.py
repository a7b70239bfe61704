"""Say of each tensor of a checkpoint how it is stored and how it differs from the original's."""

import sys
from collections import Counter
from pathlib import Path

from yardstick.cli.common import parser, run_step
from yardstick.errors import YardstickError
from yardstick.models.folder import Original, open_folder
from yardstick.models.prefill import exact_arithmetic, expected_tensors, head_name
from yardstick.report.markdown import table
from yardstick.sources import TensorSource, open_source
from yardstick.sources.detective import Finding, inspect_tensor
from yardstick.sources.smoothing import AFTER_NORM, norm_factors


def main(arguments) -> None:
    exact_arithmetic()
    if not arguments.base.is_dir():
        raise YardstickError(f"{arguments.base}: no such folder; --base is the original's Hugging Face folder")
    original = open_folder(arguments.base)
    source = open_source(arguments.spec, original.config, original.source)
    factors = {}
    for layer in range(original.config.num_layers):
        factors |= norm_factors(source, original.source, original.config, layer)
    expected = expected_tensors(original.config, source)
    findings = {name: inspect_one(name, source, original, factors) for name in expected if name in source.infos()}
    explain_norms(findings, original)
    rows = []
    for name in expected:
        if name not in findings:
            rows.append([name, "–", "–", "–", "missing", ""])
            continue
        info, finding = source.infos()[name], findings[name]
        bits = f"{info.bits / info.numel:.3f}"
        rows.append([name, info.scheme, bits, f"{finding.error:.4f}", finding.verdict, finding.detail])
    for name in sorted(set(source.infos()) - set(expected)):
        reason = source.ignored().get(name)
        verdict = "ignored" if reason else "left over"
        rows.append([name, source.infos()[name].scheme, "–", "–", verdict, reason or ""])
    counts = Counter(verdict for *_, verdict, _ in rows)
    print(table(["tensor", "scheme", "bits", "relative error", "verdict", "detail"], rows, left=2))
    print(", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())), file=sys.stderr)


def inspect_one(name: str, source: TensorSource, original: Original, factors: dict) -> Finding:
    """One tensor beside the original's; a head that the original ties is compared with its embedding."""
    stored = original.config.head_name if name == head_name(source, original.config) else name
    base = original.source.get(stored if stored in original.source.infos() else name)
    return inspect_tensor(source.get(name), base, factors.get(name))


def explain_norms(findings: dict[str, Finding], original: Original) -> None:
    """A norm whose change is undone in the matrices after it is smoothed, whatever its own error."""
    config = original.config
    for layer in range(config.num_layers):
        for norm, readers in AFTER_NORM.items():
            name = config.layer_name(layer, norm)
            after = [findings.get(config.layer_name(layer, f"{matrix}.weight")) for matrix in readers]
            smoothed = [finding for finding in after if finding and finding.verdict == "smoothed"]
            if name in findings and smoothed:
                detail = "its factors are undone in the matrices that read it"
                findings[name] = Finding(findings[name].error, "smoothed", detail)


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("spec", help="the checkpoint as kind:path, such as gguf:model.gguf or ct:folder")
    arguments.add_argument("--base", type=Path, required=True, help="Hugging Face folder of the original")
    run_step(main, arguments)
