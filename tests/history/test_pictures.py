"""Images and histograms that ranks report: encoded, sent, kept in the folder, shown in saved records."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from notebook_launcher import Accelerator, histogram, launch, report, runs
from notebook_launcher.drawing.reported import read_rows, reported_html
from notebook_launcher.errors import RunFolderError
from notebook_launcher.history.run_files import MAX_PICTURE_BYTES, PictureFiles, read_pictures
from notebook_launcher.history.schema import RunPicture
from notebook_launcher.pictures import MAX_BYTES, MAX_SIDE, Histogram, encode_picture
from notebook_launcher.training.recording.logged_values import Table
from notebook_launcher.widgets.monitor.feed import ReportedPictureFeed

if TYPE_CHECKING:
    from pathlib import Path

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")


def pixels_of(value: Any) -> Any:
    encoded = encode_picture(value)
    assert encoded is not None
    mime, data = encoded
    assert mime == "image/png"
    return np.asarray(Image.open(io.BytesIO(data)))


def test_arrays_of_bytes_and_of_floats_are_the_same_image() -> None:
    bytes_ = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
    assert (pixels_of(bytes_) == bytes_).all()
    assert (pixels_of(bytes_ / 255.0) == bytes_).all()
    assert (pixels_of(torch.tensor(bytes_).permute(2, 0, 1)) == bytes_).all()
    assert (pixels_of(torch.tensor(bytes_)) == bytes_).all()
    assert (pixels_of(Image.fromarray(bytes_)) == bytes_).all()
    assert (pixels_of(bytes_[:, :, 0]) == bytes_[:, :, 0]).all()
    assert (pixels_of(torch.tensor(bytes_ / 255.0, dtype=torch.bfloat16, requires_grad=True)).shape) == (4, 5, 3)


def test_float_outside_its_range_is_cut_and_nan_is_black() -> None:
    values = np.array([[[-1.0], [2.0], [math.nan], [0.5]]])
    assert pixels_of(values).tolist() == [[0, 255, 0, 128]]


def test_large_image_is_made_smaller() -> None:
    assert pixels_of(np.zeros((3 * MAX_SIDE, 10, 3), np.uint8)).shape == (MAX_SIDE, 4, 3)
    noise = np.random.default_rng(0).integers(0, 256, (1000, 1000, 3), dtype=np.uint8)
    encoded, pillow = encode_picture(noise), encode_picture(Image.fromarray(noise))
    assert encoded is not None
    assert pillow is not None
    assert max(len(encoded[1]), len(pillow[1])) <= MAX_BYTES


def test_matrix_is_refused_with_the_way_to_show_it() -> None:
    with pytest.raises(
        TypeError,
        match=r"^report\(weights=Tensor of shape \(2, 2\)\): a metric must be one number.* "
        r"A picture needs 1, 3 or 4 channels: pass x\[\.\.\., None\]",
    ):
        report(weights=torch.zeros(2, 2))
    with pytest.raises(TypeError, match=r"report\(loss=None\): a metric must be one number\. Leave it out until"):
        report(loss=None)
    with pytest.raises(TypeError, match="a histogram is a picture, not a number"):
        float(histogram([1.0]))


@pytest.mark.parametrize(
    ("value", "shown"), [(0.5, "0.5"), ("text", "'text'"), (np.zeros((2, 2)), r"ndarray of shape \(2, 2\)")]
)
def test_value_that_is_no_image_is_refused_before_any_tracker(value: Any, shown: str, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=tmp_path)
    accelerator.init_trackers("project")
    message = rf"^log_images\(\{{'x/1': {shown}\}}\): this is not an image. Pass an array or tensor with 1, 3 or 4"
    with pytest.raises(TypeError, match=message):
        accelerator.log_images({"x": [np.zeros((2, 2, 3)), value]})
    assert not [path for path in tmp_path.rglob("*") if path.suffix == ".png"]
    accelerator.end_training()


def test_histogram_counts_finite_values() -> None:
    found = histogram(torch.tensor([0.0, 1.0, 1.0, 4.0, math.nan, math.inf]), bins=4)
    assert found == Histogram(0.0, 4.0, (1, 2, 0, 1), 2)
    assert histogram(torch.ones(3), bins=3).counts == (0, 3, 0)
    assert histogram([], bins=2) == Histogram(0.0, 0.0, (0, 0), 0)
    encoded = encode_picture(found)
    assert encoded is not None
    assert "4 values, 2 not finite" in encoded[1].decode()
    with pytest.raises(ValueError, match=r"histogram\(bins=0\): the number of bins can be 1 to 1000"):
        histogram([1.0], bins=0)


def train() -> None:
    accelerator = Accelerator(cpu=True)
    for step in range(3):
        report(step=step, loss=1.0, sample=torch.full((3, 8, 8), step / 3), weights=histogram(torch.randn(100)))
    accelerator.log_images({"both": [np.zeros((2, 2, 3)), np.ones((2, 2, 3))]}, step=3)
    accelerator.log_table("answers", ["text", "score"], [["<b>4</b>", 0.5], ["five", 1]], step=3)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    accelerator.preview(torch.optim.lr_scheduler.LinearLR(optimizer))


def test_reported_pictures_are_kept_in_the_folder_of_the_run(home: Path) -> None:
    run = launch(train, 2, output="none")
    run.result()
    assert {(picture.name, picture.rank) for picture in run.pictures} == {
        *((name, rank) for name in ("sample", "weights", "both/0", "both/1") for rank in (0, 1)),
        ("answers", 0),
        ("rates ahead", 0),
    }
    assert [point.values for point in run.metrics] == [{"loss": 1.0}] * 6
    (kept,) = runs(home)
    assert kept.pictures == run.pictures
    assert kept.pictures_since(16)[1] == 18
    assert kept._repr_html_().count("<img src") >= 4
    bundle = kept.pictures[0]._repr_mimebundle_()
    assert bundle["image/png"].startswith(b"\x89PNG")
    assert bundle["text/plain"].startswith("RunPicture(rank=")
    (table,) = (picture for picture in kept.pictures if picture.name == "answers")
    csv = "text,score\n<b>4</b>,0.5\nfive,1\n"
    assert table._repr_mimebundle_() == {"text/plain": csv}
    assert [path.read_text() for path in kept.folder.glob("*.csv")] == [csv]
    assert "answers, rank 0, step 3" in kept._repr_html_()
    assert "&lt;b&gt;4&lt;/b&gt;" in kept._repr_html_()
    (sent,) = (record for record in ReportedPictureFeed(kept).everything() if record["name"] == "answers")
    assert sent["rows"] == [["text", "score"], ["<b>4</b>", "0.5"], ["five", "1"]]
    kept.delete()
    assert not kept.folder.exists()


def picture(number: int, size: int = 1000, name: str = "x") -> RunPicture:
    return RunPicture(rank=0, step=number, time=0.0, name=name, mime="image/png", data=bytes(size))


def test_folder_takes_fewer_pictures_the_fuller_it_is(tmp_path: Path) -> None:
    files = PictureFiles(tmp_path, limit=100_000)
    files.write(picture(number) for number in range(400))
    steps = [kept.step for kept in read_pictures(tmp_path)]
    assert steps[:50] == list(range(50))
    assert steps[-1] >= 300
    assert sum(path.stat().st_size for path in tmp_path.glob("*.png")) == files.size <= 100_000


def test_list_that_another_program_changed_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    PictureFiles(tmp_path).write([picture(0), picture(1)])
    (tmp_path / "picture-0.png").unlink()
    with (tmp_path / "pictures.jsonl").open("a") as file:
        file.write('{"file": "../x.png", "rank": 0, "step": 0, "time": 0, "name": "a"}\n{"file": 3}\nno json\n')
    assert [kept.step for kept in read_pictures(tmp_path)] == [1]


def test_list_that_names_one_large_file_many_times_is_refused(tmp_path: Path) -> None:
    PictureFiles(tmp_path).write([picture(0, size=MAX_PICTURE_BYTES // 4)])
    listed = tmp_path / "pictures.jsonl"
    listed.write_text(listed.read_text() * 5)
    with pytest.raises(RunFolderError, match="names more than 32,000,000 bytes of pictures"):
        read_pictures(tmp_path)


class Reader:
    """A reader of pictures alone."""

    def __init__(self, pictures: list[RunPicture]) -> None:
        self.pictures = pictures

    def pictures_since(self, position: int) -> Any:
        return self.pictures[position:], len(self.pictures)


def test_page_gets_a_bounded_number_of_pictures_and_always_the_newest() -> None:
    reader: Any = Reader([picture(number, 20_000) for number in range(300)])
    feed = ReportedPictureFeed(reader)
    assert [record["step"] for record in feed.everything()] == list(range(250, 300))
    reader.pictures += [picture(number, 300_000) for number in range(300, 310)]
    assert [record["step"] for record in feed.news()] == [309]
    assert feed.news() == []


def test_long_table_is_cut_with_a_note() -> None:
    data = Table(("number",), tuple((number,) for number in range(500_000))).to_bounded_csv()
    assert 900_000 < len(data) < 1_000_100
    *rows, last = data.decode().splitlines()
    assert last == f"[{500_000 - len(rows) + 1:,} more rows]"
    assert rows[-1] == str(len(rows) - 2)


def test_wide_or_ragged_table_is_shown_as_far_as_it_goes() -> None:
    wide = RunPicture(rank=0, step=0, time=0.0, name="wide", mime="text/csv", data=b"a,b\n1\n" + b",".join([b"x"] * 99))
    assert [len(row) for row in read_rows(wide, 10)] == [24, 24, 24]
    assert reported_html([wide]).count("<td") == 2 * 24
