"""RQ-VAE as a quantizer: an MLP into a narrow space, residual codebooks there, an MLP back.

This module only applies a trained one, in numpy; `gti_core.quantizer.rqvae_training` fits it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gti_core.errors import DataError
from gti_core.quantizer.base import (
    Quantizer,
    as_vectors,
    codebook_tensors,
    codebooks_from_tensors,
)
from gti_core.types import FloatArray, JsonDict


@dataclass(frozen=True)
class Linear:
    """Weights of one layer: ``weight`` [out, in] and ``bias`` [out], float32."""

    weight: FloatArray
    bias: FloatArray


def apply_mlp(layers: Sequence[Linear], rows: FloatArray) -> FloatArray:
    """Linear layers with ReLU between them, none after the last: [N, in] to [N, out] float32."""
    for index, layer in enumerate(layers):
        if index:
            rows = np.maximum(rows, 0.0, dtype=np.float32)
        rows = rows @ layer.weight.T + layer.bias
    return rows


class RqVae(Quantizer):
    """A trained RQ-VAE.

    Args:
        codebooks: per level, [K_l, d].
        encoder: layers E -> ... -> d.
        decoder: layers d -> ... -> E.
        mean: mean of the training vectors, [E]; taken off before the encoder.
        scale: what the centred vectors are divided by, positive.

    Raises:
        DataError: shapes that do not fit together.
    """

    kind = "rq-vae"

    def __init__(
        self,
        codebooks: Sequence[FloatArray],
        encoder: Sequence[Linear],
        decoder: Sequence[Linear],
        mean: FloatArray,
        scale: float,
    ) -> None:
        super().__init__(codebooks)
        self.encoder = tuple(encoder)
        self.decoder = tuple(decoder)
        self.mean = np.asarray(mean, dtype=np.float32)
        self.scale = float(scale)
        if self.mean.ndim != 1 or not self.scale > 0.0:
            raise DataError(f"RQ-VAE mean has shape {self.mean.shape} and scale {self.scale}")
        _check_chain("encoder", self.encoder, len(self.mean), self.width)
        _check_chain("decoder", self.decoder, self.width, len(self.mean))

    def embed(self, vectors: FloatArray) -> FloatArray:
        """Encoder output, [N, E] to [N, d] float32. No dropout."""
        rows = as_vectors(vectors, len(self.mean))
        return apply_mlp(self.encoder, (rows - self.mean) / np.float32(self.scale))

    def decode(self, points: FloatArray) -> FloatArray:
        """Decoder output in the text vectors' scale, [N, d] to [N, E] float32."""
        return apply_mlp(self.decoder, points) * np.float32(self.scale) + self.mean

    def to_tensors(self) -> dict[str, NDArray[np.float32]]:
        """Codebooks, layers, mean and scale."""
        tensors = codebook_tensors(self.codebooks)
        for name, layers in (("encoder", self.encoder), ("decoder", self.decoder)):
            for index, layer in enumerate(layers):
                tensors[f"{name}.{index}.weight"] = layer.weight
                tensors[f"{name}.{index}.bias"] = layer.bias
        tensors["mean"] = self.mean
        tensors["scale"] = np.array([self.scale], dtype=np.float32)
        return tensors

    def config(self) -> JsonDict:
        """Sizes and widths, for people who read the file; the tensors say the same."""
        return {
            "sizes": list(self.sizes),
            "encoder_widths": [len(self.mean), *(len(layer.bias) for layer in self.encoder)],
        }

    @classmethod
    def from_tensors(cls, tensors: dict[str, NDArray[np.float32]], config: JsonDict) -> RqVae:
        """Inverse of `to_tensors` and `config`. Raises DataError where they disagree."""
        try:
            quantizer = cls(
                codebooks_from_tensors(tensors),
                _layers(tensors, "encoder"),
                _layers(tensors, "decoder"),
                tensors["mean"],
                float(tensors["scale"][0]),
            )
        except (KeyError, IndexError) as error:
            raise DataError(f"RQ-VAE tensors are incomplete: {error}") from error
        if {**quantizer.config(), **config} != quantizer.config():
            raise DataError(f"RQ-VAE config {config} contradicts its tensors")
        return quantizer


def _layers(tensors: dict[str, NDArray[np.float32]], name: str) -> list[Linear]:
    layers: list[Linear] = []
    while (key := f"{name}.{len(layers)}.weight") in tensors:
        layers.append(Linear(tensors[key], tensors[f"{name}.{len(layers)}.bias"]))
    return layers


def _check_chain(name: str, layers: Sequence[Linear], first: int, last: int) -> None:
    """Raises DataError unless the layers lead from width ``first`` to width ``last``."""
    width = first
    for index, layer in enumerate(layers):
        if layer.weight.shape != (len(layer.bias), width):
            raise DataError(
                f"RQ-VAE {name} layer {index} has weight {layer.weight.shape} and bias "
                f"{layer.bias.shape} behind a width of {width}"
            )
        width = len(layer.bias)
    if not layers or width != last:
        raise DataError(f"RQ-VAE {name} ends with width {width}, not {last}")
