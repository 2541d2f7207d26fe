"""From a search query to the prompt's token ids. Loads a tokenizer; imports no torch.

The file ``tokenizer.json`` is read with the library that wrote it: transformers' own wrapper around
it would load torch into the service's process.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from gti_core.errors import BundleError
from gti_core.prompts import SearchPrompt
from gti_core.vocabulary import SidVocabulary

FILE = "tokenizer.json"


class QueryUnreadableError(ValueError):
    """Nothing of the query is a token of the model."""


class QueryEncoder:
    """Writes the search prompt. The ids are those of `gti_core.lm.encode_text`.

    A query takes less than a millisecond, so it is encoded where it arrives, on the event loop.
    Not for several threads at a time.

    Args:
        tokenizer: the backbone's tokenizer, with or without SID tokens. Changed in place: it
            splits the spellings of special tokens from now on.
        prompt: the template the model was trained with.
        vocabulary: the SID vocabulary.

    Raises:
        BundleError: the tokenizer is not the one the template was written with.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: SearchPrompt, vocabulary: SidVocabulary
    ) -> None:
        tokenizer.encode_special_tokens = True
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._prompt = prompt
        # Some tokenizers find a special token's spelling among their ordinary pieces. A word that
        # they don't know is no attack.
        unknown = getattr(tokenizer.model, "unk_token", None)
        self._forbidden = {
            token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special and token.content != unknown
        }
        self._first_sid = vocabulary.first_token_id
        for name, ids in (("before", prompt.before_token_ids), ("after", prompt.after_token_ids)):
            text = getattr(prompt, name)
            found = tokenizer.encode(text, add_special_tokens=False).ids
            if tuple(found) != ids:
                raise BundleError(
                    f"the tokenizer writes the search template's {text!r} as {found}, "
                    f"the bundle says {list(ids)}: it is not the one the model was trained with"
                )

    @classmethod
    def load(cls, folder: Path, prompt: SearchPrompt, vocabulary: SidVocabulary) -> QueryEncoder:
        """Load the tokenizer of a Hugging Face folder.

        Blocks for a tenth of a second or more, and holds the interpreter's lock meanwhile.

        Raises:
            BundleError: the folder has no tokenizer.json that can be read, or another one.
        """
        path = folder / FILE
        if not path.is_file():
            raise BundleError(f"search needs the tokenizer, but {folder} has no {FILE}")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise BundleError(f"{path} can't be read: {error}") from error
        return cls(tokenizer, prompt, vocabulary)

    def prompt_token_ids(self, query: str) -> list[int]:
        """Token ids of the whole prompt for a query, with no special token inside the query.

        Args:
            query: cleaned text (`gti_core.text.clean_text`) of at most
                `gti_core.prompts.MAX_QUERY_CHARS` characters.

        Raises:
            QueryUnreadableError: no token is left of the query.
        """
        ids = [
            token_id
            for token_id in self._tokenizer.encode(query, add_special_tokens=False).ids
            if token_id not in self._forbidden and token_id < self._first_sid
        ]
        if not ids:
            raise QueryUnreadableError("holds no text that the model can read")
        return self._prompt.token_ids(ids)
