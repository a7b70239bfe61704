"""Quantizer methods by name. A method's module is imported on use: an edit of one leaves the others' results alone."""

METHODS = {
    "rtn": "yardstick.quantize.run_rtn",
    "gptq": "yardstick.quantize.run_gptq",
    "distill": "yardstick.quantize.run_distill",
    "gptq-refined": "yardstick.quantize.run_refined",
    "awq": "yardstick.quantize.run_awq",
    "trellis": "yardstick.quantize.run_trellis",
    "mix": "yardstick.quantize.run_mix",
}
# the format of a method's checkpoints, where it is not `packed`
FORMATS = {"trellis": "trellis"}

# changes of the model that a recipe may ask for under `transform`, in the order in which they are made
TRANSFORMS = {
    "rotate": "yardstick.quantize.transforms.rotate",
    "awq": "yardstick.quantize.transforms.awq",
}
NEED_NO_TEXT = {"rtn", "rotate"}


def transforms_of(recipe: dict) -> list[str]:
    """Transforms of a variant, in the order in which they are made."""
    return [name for name in TRANSFORMS if name in recipe.get("transform", {})]


def starts_of(recipe: dict) -> list[str]:
    """Variants whose checkpoints the method works on."""
    return recipe["of"] if "of" in recipe else [recipe["start"]] if "start" in recipe else []


def modules_of(recipe: dict) -> list[str]:
    """Modules that make a variant: its method's first."""
    return [METHODS[recipe["method"]], *(TRANSFORMS[name] for name in transforms_of(recipe))]


def needs_text(recipe: dict) -> bool:
    """Whether the variant is made from calibration sequences."""
    return not {recipe["method"], *transforms_of(recipe)} <= NEED_NO_TEXT


def is_folded(recipe: dict) -> bool:
    """Whether the variant's norms are not the original's, so that its matrices cannot be mixed with others."""
    return "awq" in (recipe["method"], *transforms_of(recipe)) or "rotate" in transforms_of(recipe)


def search_steps(recipe: dict) -> int:
    """Steps of the search of AWQ's scales; 0 where there is none."""
    settings = recipe if recipe["method"] == "awq" else recipe.get("transform", {}).get("awq", {})
    return settings.get("steps", 0)
