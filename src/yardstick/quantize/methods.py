"""Quantizer methods by name. A method's module is imported on use: an edit of one leaves the others' results alone."""

METHODS = {
    "rtn": "yardstick.quantize.run_rtn",
    "gptq": "yardstick.quantize.run_gptq",
    "trellis": "yardstick.quantize.run_trellis",
}
# the format of a method's checkpoints, where it is not `packed`
FORMATS = {"trellis": "trellis"}
