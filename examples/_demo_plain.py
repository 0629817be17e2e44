"""The demo's model in plain torch, to compare an engine's answers with."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.utils import logging


def load_model(path: Path) -> PreTrainedModel:
    """The model with its weights."""
    logging.disable_progress_bar()
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path)
    return model.eval()


@torch.no_grad()
def logprobs_after(model: PreTrainedModel, kv: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """`[vocabulary]`: what plain torch says comes after `tokens`, which stand after the cached `kv` `[2, L, T, D]`."""
    past = DynamicCache()
    head_size = model.config.head_dim
    for layer in range(kv.shape[1]):
        keys, values = (plane[layer].unflatten(1, (-1, head_size)).transpose(0, 1)[None] for plane in kv)
        past.update(keys, values, layer)
    logits = model(torch.tensor([tokens]), past_key_values=past).logits
    return logits[0, -1].float().log_softmax(-1)
