"""The classes that `plugin` registers, one per family."""

from __future__ import annotations

from vllm.model_executor.models.gpt2 import GPT2LMHeadModel
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from service.engine.vllm_beams.model import beam_class

GtiLlamaForCausalLM = beam_class(LlamaForCausalLM, "GtiLlamaForCausalLM")
GtiQwen3ForCausalLM = beam_class(Qwen3ForCausalLM, "GtiQwen3ForCausalLM")
GtiGPT2LMHeadModel = beam_class(GPT2LMHeadModel, "GtiGPT2LMHeadModel")
