"""Commands ``offload export`` and ``offload import``, to and from the files of other programs."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated

import typer

from offload.cli.options import (
    AllowRemote,
    AllowVolatile,
    CheckpointPath,
    Parts,
    Quiet,
    progress_bar,
    tree_bytes,
)
from offload.units import size


class Target(StrEnum):
    """The formats that a checkpoint can be exported to."""

    hf = "hf"
    safetensors = "safetensors"
    pt = "pt"
    dcp = "dcp"


class Dtype(StrEnum):
    """The dtypes that live parameters can have."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


class Master(StrEnum):
    """The forms in which masters can be stored."""

    float32 = "float32"
    halves = "split"


class StateDtype(StrEnum):
    """The forms in which state other than masters can be stored."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    int8 = "int8"


def export(
    checkpoint: CheckpointPath,
    destination: Annotated[str, typer.Argument(help="File or directory to make.")],
    to: Annotated[
        Target,
        typer.Option(
            "--to",
            help="hf: model.safetensors and optimizer.pt. pt: one file of torch.save. dcp: "
            "torch.distributed.checkpoint.",
        ),
    ],
    part: Parts = None,
    config: Annotated[
        str | None,
        typer.Option(
            help="With --to hf: directory that has config.json, and the tokenizer, for "
            "from_pretrained. By default, those beside the checkpoint are taken.",
            metavar="DIR",
        ),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Write a checkpoint in another program's format.

    The optimizer state is written in FP32.
    """
    from offload import export_checkpoint, open_checkpoint

    if config is not None and to is not Target.hf:
        raise typer.BadParameter(f"--config goes with --to hf, got --to {to.value}")
    with (
        open_checkpoint(checkpoint, parts=part or None) as opened,
        progress_bar(destination, quiet=quiet) as progress,
    ):
        export_checkpoint(opened, destination, to.value, config=config, progress=progress)
        step, path, named = opened.step, opened.path, opened.has_model_names
    written = size(tree_bytes(destination))
    typer.echo(f"{destination}: step {step} of {path}, {written}")
    typer.echo(f"next: {_next_call(destination, to, named=named)}")


def import_(
    source: Annotated[
        str,
        typer.Argument(
            help="A file of torch.save, a Hugging Face checkpoint-<N> directory, or one of "
            "torch.distributed.checkpoint; or weights alone: a Hugging Face model's directory, or "
            "a .safetensors file."
        ),
    ],
    store: Annotated[
        list[str],
        typer.Argument(help="Directory of the new store, or several on different drives."),
    ],
    optimizer: Annotated[
        str,
        typer.Option(
            help="Class in torch.optim that the state belongs to. Any can begin with weights alone."
        ),
    ] = "AdamW",
    model: Annotated[
        str | None,
        typer.Option(help="File with the model, if it is not in the source."),
    ] = None,
    names: Annotated[
        str | None,
        typer.Option(
            help="File with the name of each parameter on a line, in the optimizer's order, "
            "if the source has only numbers."
        ),
    ] = None,
    frozen: Annotated[
        list[str] | None,
        typer.Option(
            help="A parameter of the optimizer that has requires_grad=False; may be repeated."
        ),
    ] = None,
    tied: Annotated[
        list[str] | None,
        typer.Option(
            help="ALIAS=NAME of a tied tensor that the source has twice, as distributed "
            "checkpoints do; may be repeated."
        ),
    ] = None,
    skip: Annotated[
        list[str] | None,
        typer.Option(
            help="Of weights alone: pattern of names that the model does not have, such as "
            "'*.inv_freq'; may be repeated."
        ),
    ] = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="Dtype of live parameters, if not that of the source."),
    ] = None,
    master: Annotated[
        Master, typer.Option(help="Form of the masters, as in Options.")
    ] = Master.float32,
    state_dtype: Annotated[
        StateDtype, typer.Option(help="Dtype of the other state, as in Options.")
    ] = (StateDtype.float32),
    step: Annotated[
        int | None,
        typer.Option(min=0, help="Number of steps taken, if the source does not record it."),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Replace the checkpoints of an existing store.")
    ] = False,
    allow_volatile: AllowVolatile = False,
    allow_remote: AllowRemote = False,
    quiet: Quiet = False,
) -> None:
    """Make a store from another program's checkpoint, or from the weights of a model.

    Training continues from it with restore(). With weights alone, a new optimizer begins.
    """
    import torch

    from offload import Options, UnsupportedOptimizerError, import_checkpoint

    classes = {
        name: cls
        for name, cls in vars(torch.optim).items()
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
    }
    del classes["Optimizer"]
    if optimizer not in classes:
        raise UnsupportedOptimizerError(
            f"torch.optim has no class {optimizer!r}{_did_you_mean(optimizer, classes)}"
        )
    listed = None
    if names is not None:
        with open(names, encoding="utf-8") as file:
            try:
                listed = file.read().split()
            except UnicodeDecodeError as error:
                raise typer.BadParameter(f"{names} is not text in UTF-8") from error
    with progress_bar(source, quiet=quiet) as progress:
        made = import_checkpoint(
            source,
            store,
            classes[optimizer],
            model=model,
            names=listed,
            frozen=frozen or (),
            tied=dict(_pair(text) for text in tied or ()),
            skip=skip or (),
            dtype=None if dtype is None else getattr(torch, dtype.value),
            options=Options(
                master=master.value,
                state_dtype=state_dtype.value,
                allow_volatile=allow_volatile,
                allow_remote=allow_remote,
            ),
            fresh=fresh,
            step=step,
            progress=progress,
        )
    state = "" if made.optimizer else " without optimizer state: a new optimizer begins with them"
    typer.echo(f"{made.path}: step {made.step}, {made.num_parameters} parameters{state}")


def _next_call(destination: str, to: Target, *, named: bool) -> str:
    """Return what opens an export: a call in Python, or what is missing for one."""
    if to is Target.pt:
        return f"torch.load({destination!r}, weights_only=True)"
    if to is Target.safetensors:
        weights = os.path.join(destination, "model.safetensors")
        return f"safetensors.torch.load_file({weights!r})"
    if to is Target.dcp:
        return f"torch.distributed.checkpoint.load(state, checkpoint_id={destination!r})"
    if not named:
        return (
            "from_pretrained cannot open it, because its parameters have no names of a model: pass "
            "model= to the optimizer, and export a later checkpoint"
        )
    model_class = _model_class(os.path.join(destination, "config.json"))
    if model_class is None:
        return (
            "from_pretrained needs a config.json: export again with --config DIR, a directory that "
            "model.config.save_pretrained(DIR) has written"
        )
    adapter = os.path.join(destination, "adapter")
    adapted = _adapted_class(os.path.join(adapter, "adapter_config.json"))
    if model_class == "AutoModel" and adapted:
        model_class = adapted  # names of the adapter are those of the class that it was made for
    if _has_other_names(destination, model_class):
        return (
            f"from_pretrained would open none of it: {model_class} has other names than the model "
            "that was trained, which wraps it. Load model.safetensors into that one: "
            "offload.load_parameters(model, checkpoint)"
        )
    call = f"transformers.{model_class}.from_pretrained({destination!r})"
    if not os.path.isdir(adapter):
        return call
    if adapted is not None:
        return f"peft.PeftModel.from_pretrained({call}, {adapter!r})"
    return (
        f"{call}  # without the adapter of peft. For both, export again with --config DIR, into "
        "which model.save_pretrained(DIR) has written adapter_config.json as well"
    )


def _model_class(config: str) -> str | None:
    """Return the name of the class that a ``config.json`` is for; None if there is no such file."""
    try:
        with open(config, encoding="utf-8") as file:
            names = json.load(file).get("architectures")
    except FileNotFoundError:
        return None
    except (ValueError, AttributeError):
        names = None
    known = isinstance(names, list) and names and str(names[0]).isidentifier()
    return str(names[0]) if known else "AutoModel"


def _has_other_names(destination: str, model_class: str) -> bool:
    """Return whether a class of transformers would find none of its parameters in an export.

    It would return random ones, with no more than a warning.
    """
    try:
        import torch
        import transformers
        from safetensors import safe_open

        config = transformers.AutoConfig.from_pretrained(destination)
        found = getattr(transformers, model_class)
        make = getattr(found, "from_config", None) or found._from_config
        with torch.device("meta"):
            model = make(config)
        with safe_open(os.path.join(destination, "model.safetensors"), "pt") as file:
            held = {*file.keys()}
    except Exception:  # noqa: BLE001  (what transformers cannot make here is not known to be wrong)
        return False
    prefix = f"{model.base_model_prefix}."
    wanted = {*model.state_dict()}
    wanted |= {prefix + name for name in wanted} | {name.removeprefix(prefix) for name in wanted}
    return not held & wanted


_CLASSES_OF_TASKS = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
}
"""Classes of transformers, by the task in the config of an adapter of peft."""


def _adapted_class(config: str) -> str | None:
    """Return the class that an adapter of peft was made for.

    The result is empty if its config does not say, and None if there is no such file.
    """
    try:
        with open(config, encoding="utf-8") as file:
            found = json.load(file)
        named = (found.get("auto_mapping") or {}).get("base_model_class")
        return str(named or _CLASSES_OF_TASKS.get(found.get("task_type"), ""))
    except FileNotFoundError:
        return None
    except (ValueError, AttributeError, TypeError):
        return ""


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a sentence: the known names that are close to `name`, or all of them."""
    by_lower = {one.lower(): one for one in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=3)
    if close:
        return f"; did you mean {' or '.join(by_lower[one] for one in close)}?"
    return f"; it has {', '.join(sorted(by_lower.values()))}"


def _pair(text: str) -> tuple[str, str]:
    alias, equals, name = text.partition("=")
    if not (alias and equals and name):
        raise typer.BadParameter(f"--tied takes ALIAS=NAME, got {text!r}")
    return alias, name
