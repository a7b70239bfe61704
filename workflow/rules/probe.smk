# Each quantized matrix on its own, on what the original's matrix reads.


rule build_probe_inputs:
    input:
        code=code("yardstick.cli.build_probe_inputs"),
        model="data/models/{model}/manifest.json",
        chunks="data/quality/{model}/chunks.npz",
    output:
        manifest="results/quality/{model}/reference/probe_manifest.json",
        inputs="results/quality/{model}/reference/probe.safetensors",
    log:
        "logs/{model}/build_probe_inputs.log",
    benchmark:
        "benchmarks/{model}/build_probe_inputs.tsv"
    wildcard_constraints:
        model=closed_list(model for model, names in PROBED.items() if names),
    threads: workflow.cores
    resources:
        gpu=1,
        mem_mb=2500,
    params:
        recipe=as_json(EXPERIMENT.probe_inputs_recipe()),
    message:
        "Collecting what the matrices of {wildcards.model} read"
    shell:
        "python -m yardstick.cli.build_probe_inputs --recipe {params.recipe:q} --model {input.model}"
        " --chunks {input.chunks} --output {output.manifest} --log {log}"


rule probe_candidate:
    input:
        code=lambda w: code("yardstick.cli.probe", KINDS[EXPERIMENT.probe_recipe(w.candidate)["source"]][0]),
        model="data/models/{model}/manifest.json",
        checkpoint=checkpoint,
        content=checkpoint_content,
        manifest="results/quality/{model}/reference/probe_manifest.json",
        inputs="results/quality/{model}/reference/probe.safetensors",
    output:
        "results/quality/{model}/{candidate}/probe.json",
    log:
        "logs/{model}/{candidate}/probe.log",
    benchmark:
        "benchmarks/{model}/{candidate}/probe.tsv"
    wildcard_constraints:
        candidate=closed_list({name for names in PROBED.values() for name in names}),
    priority: 1  # like the evaluation: before anything else is made or fetched
    threads: workflow.cores
    resources:
        gpu=1,
        mem_mb=2500,
    params:
        recipe=lambda w: as_json({"model": w.model} | EXPERIMENT.probe_recipe(w.candidate)),
    message:
        "Probing the matrices of {wildcards.candidate} of {wildcards.model}"
    shell:
        "python -m yardstick.cli.probe --recipe {params.recipe:q} --name {wildcards.candidate} --model {input.model}"
        " --checkpoint {input.checkpoint} --inputs {input.manifest} --output {output} --log {log}"
