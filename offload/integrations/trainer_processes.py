"""Several processes of Hugging Face's Trainer: how it divides the model, and what is refused."""

from __future__ import annotations

from accelerate.state import AcceleratorState
from transformers import TrainingArguments

from offload import OffloadError
from offload.integrations.first_rank import num_hosts_of_launcher, require_one_host


def fsdp_version(args: TrainingArguments) -> int:
    """Return the version of FSDP that the Trainer uses; 0 for none."""
    plugin = AcceleratorState._shared_state.get("fsdp_plugin")
    if plugin is not None:
        return int(plugin.fsdp_version)
    return int((args.fsdp_plugin_args or {}).get("fsdp_version", 0)) if args.fsdp else 0


def require_processes(args: TrainingArguments) -> None:
    """Refuse arguments that are not supported with several processes.

    Raises:
        OffloadError: The message names the argument, and says what to do instead.
    """
    if args.world_size == 1:
        return
    require_one_host(num_hosts_of_launcher(), "the Trainer")
    if fsdp_version(args) == 1:
        raise OffloadError(
            "fsdp_config={'version': 1}: FSDP1 is not supported, because it puts parameters of its "
            "own in the place of the model's: leave the version out, for FSDP2"
        )
    if args.deepspeed:
        raise OffloadError(
            "deepspeed=: DeepSpeed steps and saves by itself, with an optimizer of its own: leave "
            "it out, and use DistributedDataParallel or FSDP2 (fsdp=True)"
        )
    if args.enable_jit_checkpoint:
        raise OffloadError(
            "enable_jit_checkpoint=True is not supported with several processes: the signal "
            "reaches each of them in another step, so that they save different states. Use "
            "save_steps="
        )
