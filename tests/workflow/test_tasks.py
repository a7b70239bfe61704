"""What stands beside fidelity, through the workflow: answers, servers, parts, attribution, the probe."""

import http.server
import json
import threading

import pandas as pd
import pytest

FOLDER = "results/quality/tiny"
ANSWERS = "results/gsm8k/tiny"


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers 7 to everything, and cannot be asked what begins with "What is 3"."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        choice = {"message": {"role": "assistant", "content": "#### 7"}, "finish_reason": "stop"}
        data = json.dumps({"choices": [choice]}).encode()
        if body["messages"][-1]["content"].startswith("What is 3"):
            data = data[:10]
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *given):
        pass


@pytest.fixture
def server():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()
    server.server_close()


def read(tree, path):
    return json.loads((tree.folder / path).read_text())


def add_tasks(tree, server):
    """Problems in GSM8K's own format, one candidate that is the original again, and all that the record may hold."""
    rows = [
        {"question": f"What is {i} + 4?", "answer": f"It is <<{i}+4={i + 4}>>{i + 4}.\n#### {i + 4}"} for i in range(9)
    ]
    path = tree.folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = tree.config["models"].pop("tiny")
    tree.config["models"] = {"tiny": model}
    tree.config["rivals"]["same"] = {"kind": "local", "format": "hf", "path": model["path"]}
    tree.config |= {
        "gsm8k": {
            "problems": {"kind": "file", "path": "train.jsonl"},
            "examples": 1,
            "max_new_tokens": 12,
            "batch": 3,
            "candidates": ["same", "gguf-iq4_xs"],
            "servers": {"theirs": {"base_url": server, "model": "x", "retries": 0}},
        },
        "probe": {"positions": 60, "candidates": ["same", "gptq-g32"]},
        "attribution": {"candidates": ["rtn-g32"], "positions": 192},
        "parts": {
            "iq4-our-head": {"candidate": "gguf-iq4_xs", "head_from": "gptq-g32"},
            "rtn-body": {"candidate": "rtn-g32", "keep_bf16": "lm_head"},
        },
    }
    tree.write_config()


def test_all_that_stands_beside_fidelity(tree, server):
    add_tasks(tree, server)
    tree.must_run("results/gsm8k/table.md", "results/quality/quantization.md")
    assert (
        "Nothing to be done" in tree.must_run("-n", "results/gsm8k/table.md", "results/quality/quantization.md").stdout
    )

    # the same weights: nothing is lost, gained or diverges, exactly
    same = read(tree, f"{FOLDER}/same/summary.json")
    assert same["kl"]["mean"] == same["kl"]["max"] == 0.0 and same["top1"] == 1.0
    for name in ("same", "noise-repeat"):
        pair = read(tree, f"{ANSWERS}/{name}/summary.json")["paired"]
        assert (pair["pairs"], pair["lost"], pair["gained"], pair["p"], pair["difference"]) == (8, 0, 0, 1.0, 0.0)
        own, original = (pd.read_parquet(tree.folder / f"{ANSWERS}/{n}/answers.parquet") for n in (name, "reference"))
        assert own.equals(original) and original["gold"].tolist() == [str(i + 4) for i in range(1, 9)]

    # one was not asked, 3 + 4 of the others is not there: seven wrong answers
    counts = read(tree, f"{ANSWERS}/theirs/summary.json")["gsm8k"]["counts"]
    assert counts["not_asked"] == 1 and counts["wrong"] == 7 and counts["correct"] == 0
    table = (tree.folder / "results/gsm8k/table.md").read_text()
    assert "Could not be asked, and in no figure: `theirs` 1 of 8." in table
    assert "Flip floor, the original against itself: 0 lost and 0 gained of 8 (*noise-repeat*)." in table
    assert "token limit before the answer was complete** (more than 2 %): original 8 of 8" in table  # random weights

    # parts: the head of one, the body of the other
    bits = {
        n: read(tree, f"{FOLDER}/{n}/summary.json")["bits_per_weight"]
        for n in ("iq4-our-head", "gguf-iq4_xs", "gptq-g32")
    }
    assert bits["iq4-our-head"]["body"] == bits["gguf-iq4_xs"]["body"]
    assert bits["iq4-our-head"]["head"] == bits["gptq-g32"]["head"] == 5.0
    kl = {name: read(tree, f"{FOLDER}/{name}/summary.json")["kl"]["mean"] for name in ("rtn-body", "rtn-g32")}
    assert 0 < kl["rtn-body"] < kl["rtn-g32"]

    found = read(tree, f"{FOLDER}/rtn-g32/attribution.json")
    branches = {branch["name"]: branch["kl"] for branch in found["branches"]}
    assert (
        branches["all"] > branches["body"] > 0 and len([b for b in found["branches"] if b["group"] == "matrix"]) == 15
    )

    probe = read(tree, f"{FOLDER}/same/probe.json")
    assert all(m["output_error"] == m["weight_error"] == 0.0 for m in probe["matrices"])
    assert all(0 < m["output_error"] < 0.5 for m in read(tree, f"{FOLDER}/gptq-g32/probe.json")["matrices"])

    record = (tree.folder / "results/quality/quantization.md").read_text()
    for heading in ("On the model's own text", "Answers to arithmetic in words", "Where the loss comes from"):
        assert f"### {heading}" in record
    assert "`iq4-our-head`" in record and "plots/tiny/attribution-rtn-g32.png" in record


def test_wrong_tasks_are_one_line_each(tree, server):
    for change, message in (
        ({"gsm8k": {"problems": {"kind": "file", "path": "gone.jsonl"}}}, "gone.jsonl"),
        ({"gsm8k": {"problems": {"kind": "synthetic", "problems": 3, "seed": 1}, "candidates": ["x"]}}, "'x' is not a"),
        ({"parts": {"p": {"candidate": "rtn-g32", "keep_bf16": "no_such"}}}, "no_such"),
    ):
        tree.config = {k: v for k, v in tree.config.items() if k not in ("gsm8k", "parts")} | change
        tree.write_config()
        target = "results/gsm8k/table.md" if "gsm8k" in change else f"{FOLDER}/p/summary.json"
        result = tree.run(target)
        assert result.returncode == 1 and message in result.stderr and "Traceback" not in result.stderr, result.stderr
        assert "yardstick: " in result.stderr or "MissingInputException" not in result.stderr


def test_speed_is_measured_and_told(tree):
    tree.config["engine"] = {"rows": [1], "dtypes": ["float32"], "prompt": 5, "steps": 3}
    tree.write_config()
    folder = "results/engine/tiny"
    tree.must_run(f"{folder}/speed.md")
    record, text = read(tree, f"{folder}/speed.json"), (tree.folder / folder / "speed.md").read_text()
    assert record["candidate"] == "gptq-g32" and record["bandwidth"] > 0
    paths = {product["path"] for product in record["products"]}
    assert {"dequantize", "dense", "torch-int4"} <= paths
    # hidden 96 (3 query heads of 32 on 1 key head, q, k and v joined), gate and up of 160 joined, and the head
    shapes = {(product["out_features"], product["in_features"]) for product in record["products"]}
    assert shapes == {(160, 96), (96, 96), (320, 96), (96, 160), (512, 96)}
    assert [(run["mode"], run["dtype"]) for run in record["decode"]] == [("packed", "float32"), ("dense", "float32")]
    assert "![Roofline](roofline.png)" in text and (tree.folder / folder / "roofline.png").is_file()
    for run in record["decode"]:  # the same text written with drafts, which change nothing
        (found,) = run["speculation"]
        assert (found["draft"], found["most"], found["same"]) == ("prompt lookup", 7, len(run["written"]) == 4 and 4)
    # of the packed weights a step reads 5 bits each: int4 in groups of 32
    packed, dense = (run["matrix_bytes"] for run in record["decode"])
    assert dense / packed == pytest.approx(32 / 5, rel=0.01)
    # fidelity of weights that stay packed is that of dequantized ones; what it comes from is the engine's code too
    row = f"{FOLDER}/gptq-g32/summary.json"
    dense = read(tree, row)["kl"]["mean"]
    tree.config["evaluation"]["weights"] = "packed"
    tree.write_config()
    tree.must_run(row)
    assert read(tree, row)["recipe"]["evaluate"]["weights"] == "packed"
    assert read(tree, row)["kl"]["mean"] == pytest.approx(dense, abs=1e-6)
    with open(tree.folder / "src/yardstick/engine/kernels/gemv.py", "a") as stream:
        stream.write("# a change\n")
    again = tree.planned()
    assert {f"Measuring {name} of tiny" for name in ("rtn-g32", "gptq-g32")} <= again
    assert "Measuring gguf-q8_0 of tiny" not in again
    for target, said in (("other/speed.md", "no model other"), ("tiny/fast.md", "no such file is made there")):
        found = tree.run(f"results/engine/{target}")
        assert found.returncode == 1 and said in found.stderr
