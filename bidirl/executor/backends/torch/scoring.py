"""One module from token ids to the log-probabilities of chosen tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from bidirl.errors import InputError
from bidirl.executor.backends.torch.loss import token_logprobs
from bidirl.executor.backends.torch.settings import TrainerConfig
from bidirl.planner.learn import Precision

__all__ = ["Scorer", "load_model"]


def load_model(folder: Path) -> Any:
    """Return the causal language model of a Hugging Face folder, float32 on the CPU; never asks a hub."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        )
    except (OSError, ValueError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise InputError(f"{folder}: cannot be read as a causal model ({reason}): give its folder") from None
    if getattr(model.config, "final_logit_softcapping", None):
        raise InputError(f"{folder}: caps its logits, which the trainer does not: choose another model")
    return model.eval()  # no dropout: the ratio compares the same function


class Scorer(torch.nn.Module):  # type: ignore[misc, unused-ignore]  # torch is absent where types are checked
    """A causal model whose output layer runs only where a log-probability is asked for."""

    def __init__(self, model: Any, config: TrainerConfig) -> None:
        super().__init__()
        self.model = model
        self.logit_tokens = config.logit_tokens
        self.narrow = config.precision is Precision.BFLOAT16
        self.device_type = torch.device(config.device).type

    def forward(self, ids: Any, places: Any) -> Any:
        """Return float32 log-probabilities of the tokens at flat ``places`` of ``ids`` [rows, tokens].

        A place is never the first of its row. Rows are padded behind their end; attention is causal.
        """
        with torch.autocast(self.device_type, torch.bfloat16, enabled=self.narrow):
            hidden = self.model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
            before = hidden.reshape(-1, hidden.shape[-1]).index_select(0, places - 1)
            matrix = self.model.get_output_embeddings().weight
            targets = ids.reshape(-1).index_select(0, places)
            found = token_logprobs(before, matrix, targets, self.logit_tokens)
        return found.clone()  # FSDP2 hooks what leaves a module, and wants no view
