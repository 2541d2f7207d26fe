"""Fitting of the RQ-VAE: reconstruction, commitment and diversity losses, k-means start.

The residual quantizer is `vector_quantize_pytorch.ResidualVQ`. It has no Sinkhorn-Knopp step, so
`SinkhornSampler` takes the place of its arg-min at the last level while training: each batch is
spread evenly over that level's codes, which keeps items with equal prefixes apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from vector_quantize_pytorch import ResidualVQ

from gti_core.errors import DataError
from gti_core.quantizer.base import as_vectors
from gti_core.quantizer.kmeans import check_sizes
from gti_core.quantizer.rqvae import Linear, RqVae
from gti_core.types import FloatArray


@dataclass(frozen=True)
class RqVaeConfig:
    """Settings of `fit_rqvae`; defaults follow the paper where it gives a figure.

    Args:
        hidden: widths of the encoder's hidden layers; the decoder mirrors them.
        code_dim: d, width of a codeword.
        dropout: after each hidden layer, while training.
        epochs: passes over the vectors.
        batch_size: vectors per step; the whole set if it is smaller.
        learning_rate: of AdamW, at the start; falls to zero along a cosine.
        weight_decay: of AdamW.
        commitment_weight: of the squared distance between residuals and their codewords.
        diversity_weight: of the negative entropy of each level's mean soft assignment.
        decay: of the moving averages that codewords are.
        dead_code_threshold: a code with a moving average of fewer vectors per batch is replaced
            by a vector of the batch; 0 turns that off.
        sinkhorn_epsilon: temperature of the balanced assignment at the last level, relative to
            the spread of the distances; None takes the nearest code there too.
        sinkhorn_iterations: row and column normalizations.
    """

    hidden: tuple[int, ...] = (512, 256)
    code_dim: int = 32
    dropout: float = 0.1
    epochs: int = 200
    batch_size: int = 256
    learning_rate: float = 1e-3
    weight_decay: float = 1e-4
    commitment_weight: float = 0.25
    diversity_weight: float = 0.01
    decay: float = 0.95
    dead_code_threshold: float = 1.0
    sinkhorn_epsilon: float | None = 0.05
    sinkhorn_iterations: int = 30

    def __post_init__(self) -> None:
        if min((*self.hidden, self.code_dim, self.epochs, self.batch_size)) < 1:
            raise DataError("RQ-VAE widths, epochs and batch size must be positive")
        if self.sinkhorn_epsilon is not None and self.sinkhorn_epsilon <= 0.0:
            raise DataError(f"sinkhorn_epsilon is {self.sinkhorn_epsilon}, must be positive")


def sinkhorn(scores: torch.Tensor, epsilon: float, iterations: int) -> torch.Tensor:
    """Balanced soft assignment of a batch to codes (Sinkhorn-Knopp).

    Args:
        scores: [B, K], larger is nearer.
        epsilon: temperature relative to the range of the scores, above 0.
        iterations: normalizations of columns and rows.

    Returns:
        [B, K] float64: rows sum to 1, columns nearly to B / K.
    """
    rows, columns = scores.shape
    scores = scores.double()
    spread = (scores.max() - scores.min()).clamp(min=1e-12)
    # In the log domain: a plain exponential underflows at small epsilon.
    plan = (scores - scores.max()) / (spread * epsilon)
    for _ in range(iterations):
        plan = plan - plan.logsumexp(dim=0, keepdim=True) + float(np.log(rows / columns))
        plan = plan - plan.logsumexp(dim=1, keepdim=True)
    return plan.exp()


class SinkhornSampler:
    """Stands in for the library's code sampler: balanced while training, nearest otherwise."""

    def __init__(self, epsilon: float, iterations: int) -> None:
        self.epsilon = epsilon
        self.iterations = iterations

    def __call__(
        self,
        logits: torch.Tensor,
        temperature: float = 1.0,
        dim: int = -1,
        training: bool = True,
        topk: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes [1, B] and their one-hot rows [1, B, K] for negative distances [1, B, K]."""
        if training:
            with torch.no_grad():
                plan = sinkhorn(logits[0], self.epsilon, self.iterations)[None]
            codes = plan.argmax(dim=dim)
        else:
            codes = logits.argmax(dim=dim)
        return codes, functional.one_hot(codes, logits.shape[dim]).type(logits.dtype)


def _mlp(widths: Sequence[int], dropout: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for index, (inner, outer) in enumerate(itertools.pairwise(widths)):
        if index:
            layers += [nn.ReLU(), nn.Dropout(dropout)]
        layers.append(nn.Linear(inner, outer))
    return nn.Sequential(*layers)


def _exported(mlp: nn.Sequential) -> list[Linear]:
    return [
        Linear(module.weight.detach().numpy().copy(), module.bias.detach().numpy().copy())
        for module in mlp
        if isinstance(module, nn.Linear)
    ]


class _Model(nn.Module):
    """Encoder, residual codebooks and decoder while they are trained."""

    def __init__(self, width: int, sizes: tuple[int, ...], config: RqVaeConfig) -> None:
        super().__init__()
        widths = (width, *config.hidden, config.code_dim)
        self.encoder = _mlp(widths, config.dropout)
        self.decoder = _mlp(widths[::-1], config.dropout)
        self.codes = ResidualVQ(
            dim=config.code_dim,
            codebook_size=sizes,
            kmeans_init=True,
            kmeans_iters=20,
            decay=config.decay,
            threshold_ema_dead_code=config.dead_code_threshold,
            commitment_weight=config.commitment_weight,
            codebook_diversity_loss_weight=config.diversity_weight,
            codebook_diversity_temperature=1.0,
            rotation_trick=True,
        )
        if config.sinkhorn_epsilon is not None and len(sizes) > 1:
            self.codes.layers[-1]._codebook.gumbel_sample = SinkhornSampler(
                config.sinkhorn_epsilon, config.sinkhorn_iterations
            )

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        """Scalar loss of a batch [B, E]."""
        quantized, _, losses = self.codes(self.encoder(batch))
        loss: torch.Tensor = functional.mse_loss(self.decoder(quantized), batch) + losses.sum()
        return loss


def fit_rqvae(
    vectors: FloatArray,
    sizes: Sequence[int],
    *,
    seed: int,
    config: RqVaeConfig | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> RqVae:
    """Trains an RQ-VAE on the CPU. The same input, seed and machine give the same weights.

    Args:
        vectors: text vectors, [N, E]; N must be at least the largest codebook, whose start is a
            k-means over the encoded vectors.
        sizes: codes per level, length L.
        seed: of weights, dropout, batches and codebook starts. Torch's global generator is left
            as it was.
        config: settings, the defaults if None.
        progress: called with (epochs done, epochs) after each epoch.

    Raises:
        DataError: vectors or sizes that can't be used, or too few vectors.
    """
    config = config or RqVaeConfig()
    checked = check_sizes(sizes)
    array = as_vectors(vectors)
    if len(array) < max(checked):
        raise DataError(
            f"an RQ-VAE with {max(checked)} codes at a level needs as many vectors, got "
            f"{len(array)}; use smaller codebooks or residual k-means"
        )
    mean = array.mean(axis=0, dtype=np.float64).astype(np.float32)
    scale = float((array - mean).std()) or 1.0
    data = torch.from_numpy((array - mean) / np.float32(scale))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _Model(array.shape[1], checked, config)
        model.eval()
        with torch.no_grad():
            model.codes(model.encoder(data))
        _train(model, data, config, progress)
    model.eval()
    return RqVae(
        [np.asarray(layer.codebook.detach().numpy()).copy() for layer in model.codes.layers],
        _exported(model.encoder),
        _exported(model.decoder),
        mean,
        scale,
    )


def _train(
    model: _Model,
    data: torch.Tensor,
    config: RqVaeConfig,
    progress: Callable[[int, int], None] | None,
) -> None:
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.epochs)
    model.train()
    for epoch in range(config.epochs):
        for batch in _batches(data, config.batch_size):
            optimizer.zero_grad()
            model.loss(batch).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        schedule.step()
        if progress is not None:
            progress(epoch + 1, config.epochs)


def _batches(data: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """Shuffled batches of nearly equal size: a tiny last one would unbalance the averages."""
    count = -(-len(data) // size)
    yield from data[torch.randperm(len(data))].tensor_split(count)
