"""ServingContext: what the service needs of a bundle, joined and indexed once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gti_core.bundle.format import max_tokens
from gti_core.catalog import ItemCatalog
from gti_core.decoding import ConstraintIndex
from gti_core.errors import BundleError
from gti_core.prompts import AppendOnlyPrompt, SearchPrompt
from gti_core.vocabulary import SidVocabulary
from service.engine.base import ServingModel

if TYPE_CHECKING:
    from gti_core.bundle import Bundle


@dataclass(frozen=True)
class ServingContext:
    """One version's catalogue, vocabulary and prompt; no weights.

    Args:
        name: name of the bundle.
        digest: digest of the bundle, hex.
        catalog: the items, with texts.
        vocabulary: the SID vocabulary.
        prompt: the prompt template the model was trained with.
        index: constraint index over ``catalog.sids``.
        version: number of the version.
        search: the template for a natural-language query; None when the model can't search.
    """

    name: str
    digest: str
    catalog: ItemCatalog
    vocabulary: SidVocabulary
    prompt: AppendOnlyPrompt
    index: ConstraintIndex
    version: int = 1
    search: SearchPrompt | None = None

    @classmethod
    def build(
        cls,
        name: str,
        digest: str,
        catalog: ItemCatalog,
        vocabulary: SidVocabulary,
        prompt: AppendOnlyPrompt,
        search: SearchPrompt | None = None,
    ) -> ServingContext:
        """Check that the parts fit and index the catalogue.

        Raises:
            BundleError: an item's SID has codes that are not active in the vocabulary.
        """
        if catalog.levels != vocabulary.levels:
            raise BundleError(
                f"bundle {name!r}: items have {catalog.levels} codes, "
                f"the vocabulary {vocabulary.levels} levels"
            )
        highest = catalog.sids.max(axis=0)
        for level, active in enumerate(vocabulary.active):
            if int(highest[level]) >= active:
                raise BundleError(
                    f"bundle {name!r}: an item uses code {int(highest[level])} at level {level}, "
                    f"of which {active} are active"
                )
        index = ConstraintIndex(catalog.sids)
        return cls(name, digest, catalog, vocabulary, prompt, index, search=search)

    @classmethod
    def from_bundle(cls, bundle: Bundle) -> ServingContext:
        """The context of a loaded bundle. Raises BundleError as `build` does."""
        return cls.build(
            bundle.name,
            bundle.digest,
            bundle.catalog,
            bundle.vocabulary,
            bundle.prompt,
            bundle.search,
        )

    def model(self, model_dir: Path) -> ServingModel:
        """What an engine needs, with the folder of the merged weights."""
        return ServingModel(
            model_dir=model_dir,
            vocabulary=self.vocabulary,
            catalog=self.catalog,
            index=self.index,
            max_tokens=max_tokens(self.prompt, self.search, self.vocabulary.levels),
            version=self.version,
        )
