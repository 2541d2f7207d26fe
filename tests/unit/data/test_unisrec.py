"""Folders in UniSRec's layout: texts told apart, numbers that never reach a model."""

from __future__ import annotations

import pytest

from gti_core.data.dataset import ItemText
from gti_core.data.unisrec import read_unisrec, split_texts
from gti_core.errors import DataError

TEXTS = [
    *((f"R{n}", f"Nail {n}. Tools & Home Nails. Acme. ") for n in range(8)),
    ("A1", "Mr. Heater Kit. Tools & Home Heaters Gas. Mr. Heater. "),
    ("A2", "Tape, 2 in. x 5 yd. Tools & Home Tape. J.V. Converting. "),
    ("A3", "Fan, 24 in. . TPI. "),
    ("A4", "Lamp. Tools & Home Lamps. . "),
    ("A5", "Just a title"),
    ("A6", "Saw. Tools & Home Saws Hand Saws. Brand. "),
]


@pytest.fixture
def folder(tmp_path):
    lines = ["item_id:token\ttext:token_seq", *(f"{a}\t{b}" for a, b in TEXTS)]
    (tmp_path / "Tools.text").write_text("\n".join(lines) + "\n")
    (tmp_path / "Tools.item2index").write_text(
        "".join(f"{a}\t{n}\n" for n, (a, _) in enumerate(reversed(TEXTS)))
    )
    (tmp_path / "Tools.test.inter").write_text(
        "user_id:token\titem_id_list:token_seq\titem_id:token\n7\t5 4 0\t3\n8\t1 2\t5\n"
    )
    return tmp_path


def test_histories_hold_the_items_own_ids(folder):
    data = read_unisrec(folder)
    assert data.name == "Tools"
    assert data.histories == {"7": ("A1", "A2", "A6", "A3"), "8": ("A5", "A4", "A1")}


def test_title_path_and_brand_are_told_apart(folder):
    found = {item.item_id: item for item in read_unisrec(folder).items}
    assert found["A1"] == ItemText("A1", "Mr. Heater Kit", "Heaters Gas", {"brand": "Mr. Heater"})
    assert found["A2"].title == "Tape, 2 in. x 5 yd"
    assert found["A2"].attributes == {"brand": "J.V. Converting"}
    assert found["A3"] == ItemText("A3", "Fan, 24 in", "", {"brand": "TPI"})
    assert found["A4"] == ItemText("A4", "Lamp", "Lamps")
    assert found["A5"] == ItemText("A5", "Just a title")
    assert found["A6"].description == "Saws Hand Saws"


def test_no_department_leaves_whole_paths():
    items = [ItemText("1", "Cup. Kitchen Cups. Acme. "), ItemText("2", "Pen. Office Pens. Bic. ")]
    assert [item.title for item in split_texts(items)] == [
        "Cup. Kitchen Cups. Acme",
        "Pen. Office Pens. Bic",
    ]


def test_a_number_without_an_item_names_user_and_file(folder):
    path = folder / "Tools.test.inter"
    path.write_text(path.read_text() + "9\t1 2\t77\n")
    with pytest.raises(DataError, match=r"Tools.test.inter: user '9': item number '77'"):
        read_unisrec(folder)


def test_an_empty_folder_and_two_data_sets_ask_for_a_name(folder, tmp_path):
    with pytest.raises(DataError, match="holds 0 files"):
        read_unisrec(tmp_path / "nowhere")
    (folder / "Other.item2index").write_text("x\t0\n")
    with pytest.raises(DataError, match="holds 2 files"):
        read_unisrec(folder)
    assert read_unisrec(folder, "Tools").name == "Tools"
