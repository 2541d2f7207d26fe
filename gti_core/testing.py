"""Tiny models and data for tests: every supported family, random weights, no downloads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gti_core.data.dataset import ItemText
from gti_core.data.prepared import PreparedData
from gti_core.data.splits import leave_one_out

FAMILIES = ("llama", "qwen3", "gpt2", "gpt_neo")
VOCABULARY = 300
WIDTH = 32

_WORDS = [
    "red",
    "blue",
    "green",
    "small",
    "large",
    "old",
    "new",
    "cup",
    "chair",
    "lamp",
    "book",
    "film",
    "song",
    "tale",
    "road",
]


def tiny_model(family: str, *, tied: bool = True, seed: int = 0) -> Any:
    """A random causal LM of a family with `VOCABULARY` rows of width `WIDTH`, two layers."""
    import torch
    import transformers

    torch.manual_seed(seed)
    common: dict[str, Any] = {"vocab_size": VOCABULARY, "tie_word_embeddings": tied}
    llama = {
        "hidden_size": WIDTH,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
    }
    config: Any
    if family == "llama":
        config = transformers.LlamaConfig(**common, **llama)
    elif family == "qwen3":
        config = transformers.Qwen3Config(**common, **llama, head_dim=16)
    elif family == "gpt2":
        config = transformers.GPT2Config(
            **common, n_embd=WIDTH, n_layer=2, n_head=2, n_positions=256, bos_token_id=0,
            eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
    elif family == "gpt_neo":
        config = transformers.GPTNeoConfig(
            **common, hidden_size=WIDTH, num_layers=2, num_heads=2, bos_token_id=0,
            eos_token_id=0, attention_types=[[["global", "local"], 1]], window_size=16,
            max_position_embeddings=256,
        )  # fmt: skip
    else:
        raise ValueError(f"unknown family {family!r}")
    config.pad_token_id = 0
    model = transformers.AutoModelForCausalLM.from_config(config)
    return model.eval()


def tiny_tokenizer() -> Any:
    """A byte-level BPE tokenizer of at most `VOCABULARY` tokens with chat markers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_WORDS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|endoftext|>",  # noqa: S106
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        clean_up_tokenization_spaces=False,
    )


def tiny_backbone(folder: Path, family: str = "llama", *, tied: bool = True) -> Path:
    """A tiny model and tokenizer saved as a Hugging Face folder."""
    tiny_model(family, tied=tied).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def tiny_data(items: int = 24, users: int = 12, length: int = 8) -> PreparedData:
    """Prepared data with titles of words and cyclic histories: predictable, so learnable."""
    texts = tuple(
        ItemText(
            f"i{number}",
            f"{_WORDS[number % 7]} {_WORDS[7 + number % 8]} {number}",
            f"a {_WORDS[number % 5]} thing" if number % 2 else "",
            {"kind": [_WORDS[number % 3]], "note": "line\u2028break\x85"},
        )
        for number in range(items)
    )
    histories = {
        f"u{user}": tuple(f"i{(user * 2 + step) % items}" for step in range(length))
        for user in range(users)
    }
    return PreparedData("tiny", texts, leave_one_out(histories))
