"""Images of rows: in columns and messages, as paths, bytes and data URLs; what cannot be read is named with its row."""

import base64
import hashlib
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from titan_rl.config.sections import Config, TaskSection
from titan_rl.ext.vision import row_images
from titan_rl.ext.vision.kept_images import keep
from titan_rl.record.run_log import RunLog
from titan_rl.tasks.examples import BadRows, Example
from titan_rl.tasks.task import load_task
from titan_rl.tools import look
from titan_rl.tools.view.run_data import run_data
from titan_rl.wire.types import IMAGES, Branch, Completion, Group, ImagePlace, Prompt, Rollout, Turn


def drawn(seed: int, size: tuple[int, int] = (8, 6), kind: str = "PNG", **more: Any) -> bytes:
    values = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(values).save(file, kind, **more)
    return file.getvalue()


def named(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def load(path: Path, **keys: Any) -> list[Example]:
    task = load_task(TaskSection(name="jsonl", path=str(path), template="chat", **keys), seed=0, eval_size=0)
    return list(task.train)


def jsonl(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps({"answer": "1", **row}) + "\n" for row in rows))
    return path


def parquet(path: Path, *rows: dict[str, Any]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"answer": "1", **row} for row in rows]), path)
    return path


def said(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "system", "content": "Count."}, {"role": "user", "content": list(parts)}]


def shown(example: Example) -> list[str]:
    return [image.hash for image in example.images]


TEXT = {"type": "text", "text": "How many?"}
A, B = drawn(1), drawn(2, (5, 9), "JPEG")


def test_a_column_holds_paths_data_urls_or_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(A)
    (tmp_path / "b.jpg").write_bytes(B)
    as_text = [{"question": "?", "images": ["a.png", url(B)]}, {"question": "?", "images": str(tmp_path / "b.jpg")}]
    as_bytes = [{"images": [{"bytes": A, "path": None}, {"bytes": B, "path": "b.jpg"}]}, {"images": [{"bytes": B}]}]
    files = (
        jsonl(tmp_path / "a.jsonl", *as_text, {"question": "?", "images": None}),
        parquet(tmp_path / "a.parquet", *({"question": "?", **row} for row in [*as_bytes, {"images": None}])),
    )
    for file in files:
        examples = load(file, images_key="images")
        assert [shown(e) for e in examples] == [[named(A), named(B)], [named(B)], []]
        assert examples[0].row["images"] == [named(A), named(B)], "a row has no pixels"
        first, second = examples[0].images
        assert (first.width, first.height, first.nbytes) == (8, 6, len(A))
        assert (second.width, second.height) == (5, 9)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "a.png"},
        {"type": "image", "path": "a.png"},
        {"type": "image", "url": url(A)},
        {"type": "image_url", "image_url": {"url": url(A)}},
        {"type": "input_image", "image_url": url(A)},
    ],
)
def test_messages_hold_images(tmp_path: Path, part: dict[str, Any]) -> None:
    (tmp_path / "a.png").write_bytes(A)
    other = {"type": "image", "image": url(B)}
    (example,) = load(jsonl(tmp_path / "a.jsonl", {"question": said(other, TEXT, part)}))
    assert shown(example) == [named(B), named(A)]
    assert isinstance(example.prompt, list)
    assert example.prompt == example.row["question"]
    assert example.prompt[0]["content"] == "Count."
    assert [p.get("image", p.get("text")) for p in example.prompt[1]["content"]] == [named(B), "How many?", named(A)]


def test_parts_without_an_image_take_those_of_the_column_and_else_they_come_first(tmp_path: Path) -> None:
    bare = {"type": "image"}
    both = [url(A), url(B)]
    rows = [
        {"question": said(bare, TEXT, bare), "images": both},
        {"question": said(TEXT), "images": both},
        {"question": [{"role": "user", "content": "?"}], "images": both},
        {"question": said({"type": "image", "image": url(B)}, TEXT), "images": [url(A)]},
    ]
    examples = load(jsonl(tmp_path / "a.jsonl", *rows), images_key="images")
    assert [shown(e) for e in examples] == [[named(A), named(B)]] * 4
    orders = [[p["type"] for p in e.prompt[-1]["content"]] for e in examples if isinstance(e.prompt, list)]
    assert orders == [["image", "text", "image"], *[["image", "image", "text"]] * 3]
    asked = {"question": said(bare, TEXT)[1:], "images": [{"bytes": A, "path": None}]}
    (example,) = load(parquet(tmp_path / "a.parquet", asked), images_key="images")
    assert isinstance(example.prompt, list)
    assert example.prompt[0]["content"] == [{"type": "image", "image": named(A)}, TEXT]


def test_an_image_on_its_side_has_the_size_that_the_model_sees(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[row_images.ORIENTATION] = 6
    data = drawn(3, (8, 4), "JPEG", exif=exif)
    (example,) = load(jsonl(tmp_path / "a.jsonl", {"question": "?", "images": url(data)}), images_key="images")
    assert (example.images[0].width, example.images[0].height) == (4, 8)


def animated() -> bytes:
    file = BytesIO()
    frames = [Image.fromarray(np.full((4, 4), shade, np.uint8)) for shade in (0, 255)]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    return file.getvalue()


def bomb() -> bytes:
    file = BytesIO()
    Image.new("1", (8192, 8192)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("none.png", "image 1 of 'images': expected an image that can be read, found [Errno 2]"),
        (".", "image 1 of 'images': expected a regular file, found"),
        ("https://example.org/a.png", "image 1 of 'images': expected a path, a data URL or bytes, because nothing is"),
        (7, "image 1 of 'images': expected a path, a data URL or bytes, found 7"),
        ("data:image/png,abc", "image 1 of 'images': expected a data URL in base64, found 'data:image/png'"),
        ("data:image/png;base64,!", "image 1 of 'images': expected a data URL in base64, found"),
        (url(A[: len(A) // 2]), "image 1 of 'images': expected a whole PNG, JPEG, WEBP, GIF, BMP, TIFF image, found"),
        (
            url(b"%!PS-Adobe-3.0 EPSF-3.0"),
            "image 1 of 'images': expected a whole PNG, JPEG, WEBP, GIF, BMP, TIFF image",
        ),
        (url(animated()), "image 1 of 'images': expected a still image, found an animated GIF"),
        (url(bomb()), "image 1 of 'images': expected at most 33,554,432 pixels, found 8192 x 8192"),
    ],
)
def test_an_image_that_cannot_be_read_is_named_with_its_row(tmp_path: Path, value: Any, found: str) -> None:
    good = {"question": "?", "images": url(A)}
    file = jsonl(tmp_path / "a.jsonl", good, {"question": "?", "images": value}, good, {"question": "?", "images": 8})
    with pytest.raises(BadRows) as error:
        load(file, images_key="images")
    assert [problem.split(": ")[0] for problem in error.value.problems] == [f"{file}:2", f"{file}:4"]
    assert f"{file}:2: {found}" in error.value.problems[0]


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"question": said({"type": "image"}, TEXT)}, "part 1 of message 2: expected an image, here or in a column"),
        (
            {"question": said({"type": "video", "video": "a"})},
            "part 1 of message 2: expected a text or an image",
        ),
        ({"question": said({"type": "image", "image": "x.png"})}, "part 1 of message 2: expected an image that can be"),
    ],
)
def test_a_part_that_cannot_be_read_is_named(tmp_path: Path, row: dict[str, Any], found: str) -> None:
    with pytest.raises(BadRows, match=f"a.jsonl:1: {found}"):
        load(jsonl(tmp_path / "a.jsonl", row))


def test_a_row_without_the_column_and_a_part_too_few_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadRows, match=r"expected the column task.images_key = 'images', found answer, question"):
        load(jsonl(tmp_path / "a.jsonl", {"question": "?"}), images_key="images")
    row = {"question": said({"type": "image"}), "images": [url(A), url(B)]}
    with pytest.raises(BadRows, match="expected an image part for each image of 'images', found 2 images"):
        load(jsonl(tmp_path / "a.jsonl", row), images_key="images")


def test_images_are_kept_by_their_hash_and_a_changed_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(A)
    file = jsonl(tmp_path / "a.jsonl", {"question": "?", "images": ["a.png", url(B)]})
    (example,) = load(file, images_key="images")
    for _ in range(2):
        keep(example.images, tmp_path / "kept")
    assert {p.name: p.read_bytes() for p in (tmp_path / "kept").iterdir()} == {named(A): A, named(B): B}
    (tmp_path / "a.png").write_bytes(B)
    with pytest.raises(ValueError, match="as it was checked, found other bytes"):
        keep(example.images, tmp_path / "others")


def test_records_name_the_images_and_the_page_shows_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep([row_images._opened(A)], tmp_path / IMAGES)
    completion = Completion([8, 2], [-0.5, -0.5], [0, 0], "stop")
    rollout = Rollout([Branch([Turn([1, 9], completion)])], "1", 1.0)
    with RunLog(tmp_path, "tiny", Config()) as log:
        seen = Prompt(0, "how many", [1, 9], "1", images=(ImagePlace(named(A), 1), ImagePlace("../config.toml", 1)))
        log.step(
            1, {"reward/mean": 1.0}, {}, [Group(seen, [rollout] * 2), Group(Prompt(1, "none", [1, 9], "1"), [rollout])]
        )
    assert look.main([str(tmp_path), "--prompt", "0"]) == 0
    assert f"image {IMAGES}/{named(A)}" in capsys.readouterr().out
    shown = run_data(tmp_path, sample_bytes=10**6)
    assert [group["images"] for group in shown["groups"]] == [[named(A), "../config.toml"], []]
    assert shown["images"] == {named(A): url(A)}, "no other file of the run"
    assert any("1 of 2 images" in text for text in shown["left_out"])
