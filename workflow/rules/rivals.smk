# Rivals made here: the same original in other people's formats, by their own quantizers or exported from a variant.


rule build_imatrix:
    input:
        code=code("yardstick.cli.build_imatrix"),
        model="data/models/{model}/manifest.json",
        calibration="data/quality/{model}/calib.npz",
    output:
        "results/quality/{model}/reference/imatrix.gguf",
    log:
        "logs/{model}/build_imatrix.log",
    benchmark:
        "benchmarks/{model}/build_imatrix.tsv"
    threads: workflow.cores
    resources:
        gpu=1,
        mem_mb=2500,
    params:
        recipe=as_json({"batch_chunks": 4}),
    message:
        "Computing the importance matrix of {wildcards.model}"
    shell:
        "python -m yardstick.cli.build_imatrix --recipe {params.recipe:q} --model {input.model}"
        " --calibration {input.calibration} --output {output} --log {log}"


rule build_gguf:
    input:
        code=code("yardstick.cli.build_gguf"),
        model="data/models/{model}/manifest.json",
        imatrix=importance_matrix,
    output:
        checkpoint="results/quality/{model}/{rival}/checkpoint/model.gguf",
        manifest="results/quality/{model}/{rival}/checkpoint/manifest.json",
        record="results/quality/{model}/{rival}/quantize.json",
    log:
        "logs/{model}/{rival}/build_gguf.log",
    benchmark:
        "benchmarks/{model}/{rival}/build_gguf.tsv"
    wildcard_constraints:
        rival=closed_list(EXPERIMENT.rivals_of("gguf")),
    threads: workflow.cores
    resources:
        mem_mb=2500,
    params:
        recipe=lambda w: as_json(EXPERIMENT.recipe(w.rival)),
        imatrix=lambda w: " ".join(f"--imatrix {path}" for path in importance_matrix(w)),
    message:
        "Making the GGUF rival {wildcards.rival} of {wildcards.model}"
    shell:
        "python -m yardstick.cli.build_gguf --recipe {params.recipe:q} --model {input.model} {params.imatrix}"
        " --output {output.checkpoint} --manifest {output.manifest} --record {output.record} --log {log}"


rule build_environment:
    input:
        code=code("yardstick.cli.build_environment"),
        requirements="workflow/envs/{tool}/requirements.txt",
    output:
        "data/environments/{tool}/packages.json",
    log:
        "logs/build_environment/{tool}.log",
    benchmark:
        "benchmarks/build_environment/{tool}.tsv"
    wildcard_constraints:
        tool=closed_list(EXPERIMENT.tools()),
    threads: 1
    resources:
        mem_mb=1000,
    params:
        recipe=as_json({}),
    message:
        "Installing the environment of {wildcards.tool}"
    shell:
        "python -m yardstick.cli.build_environment --recipe {params.recipe:q} --requirements {input.requirements}"
        " --output {output} --log {log}"


rule make_rival:
    input:
        code=code("yardstick.cli.make_rival"),
        script=tool_script,
        packages=tool_packages,
        model="data/models/{model}/manifest.json",
        calibration=tool_calibration,
    output:
        manifest="results/quality/{model}/{rival}/checkpoint/manifest.json",
        record="results/quality/{model}/{rival}/quantize.json",
    log:
        "logs/{model}/{rival}/make_rival.log",
    benchmark:
        "benchmarks/{model}/{rival}/make_rival.tsv"
    wildcard_constraints:
        rival=closed_list(EXPERIMENT.rivals_of("made")),
    threads: workflow.cores
    resources:
        gpu=1,
        mem_mb=4000,
    params:
        recipe=lambda w: as_json(EXPERIMENT.recipe(w.rival)),
        calibration=lambda w: " ".join(f"--calibration {path}" for path in tool_calibration(w)),
    message:
        "Making the rival {wildcards.rival} of {wildcards.model}"
    shell:
        "python -m yardstick.cli.make_rival --recipe {params.recipe:q} --name {wildcards.rival} --model {input.model}"
        " {params.calibration} --packages {input.packages} --script {input.script} --output {output.manifest}"
        " --record {output.record} --log {log}"


rule export_variant:
    input:
        code=code("yardstick.cli.export_rival"),
        model="data/models/{model}/manifest.json",
        checkpoint=exported_variant,
    output:
        manifest="results/quality/{model}/{rival}/checkpoint/manifest.json",
        record="results/quality/{model}/{rival}/quantize.json",
    log:
        "logs/{model}/{rival}/export_variant.log",
    benchmark:
        "benchmarks/{model}/{rival}/export_variant.tsv"
    wildcard_constraints:
        rival=closed_list(EXPERIMENT.rivals_of("exported")),
    threads: 1
    resources:
        mem_mb=1500,
    params:
        recipe=lambda w: as_json(EXPERIMENT.recipe(w.rival)),
    message:
        "Exporting {wildcards.rival} of {wildcards.model}"
    shell:
        "python -m yardstick.cli.export_rival --recipe {params.recipe:q} --model {input.model}"
        " --checkpoint {input.checkpoint} --output {output.manifest} --record {output.record} --log {log}"
