"""Step 3.5 as a model of texts: transformers has its decoder only within Step 3.7, which also sees. Files have the hub's names."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationMixin
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7PreTrainedModel, Step3p7TextModel


class Step3p5ForCausalLM(Step3p7PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """The decoder of texts and its output head."""

    config: Step3p7TextConfig

    def __init__(self, config: Step3p7TextConfig) -> None:
        super().__init__(config)
        self.model = Step3p7TextModel(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, logits_to_keep: int = 0, **how: Any) -> CausalLMOutputWithPast:
        """Logits of the last `logits_to_keep` tokens; of all if it is 0."""
        seen = self.model(input_ids, **how)
        logits = self.lm_head(seen.last_hidden_state[:, -logits_to_keep:])
        return CausalLMOutputWithPast(logits=logits, past_key_values=seen.past_key_values)


def register() -> None:
    """Make it known by its name, `step3p5`; without the prefixes that Step 3.7 gives it, its tensors have the hub's names."""
    names = get_checkpoint_conversion_mapping("step3p7")
    within = [name for name in names if not any("^" in pattern for pattern in name.source_patterns)]
    register_checkpoint_conversion_mapping("step3p5", within, overwrite=True)
    AutoModelForCausalLM.register(Step3p7TextConfig, Step3p5ForCausalLM, exist_ok=True)
