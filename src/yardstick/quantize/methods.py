"""Quantizer methods by name. A method's module is imported on use: an edit of one leaves the others' results alone."""

METHODS = {
    "rtn": "yardstick.quantize.run_rtn",
    "gptq": "yardstick.quantize.run_gptq",
    "distill": "yardstick.quantize.run_distill",
    "gptq-refined": "yardstick.quantize.run_refined",
}
