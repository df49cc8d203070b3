"""How ranks start where nothing starts them in another way."""

from pathlib import Path

from titan_rl.meshes.starter import KINDS, LAUNCHER, Starter


async def test_without_a_part_that_starts_ranks_each_starts_cold(tmp_path: Path) -> None:
    cold = Starter()
    with cold.serving(tmp_path) as servers:
        servers.keep(KINDS)
        assert [await cold.launcher(kind) for kind in (*KINDS, None)] == [(LAUNCHER, {})] * 3
        assert not [*tmp_path.iterdir()]
    assert cold.folder == ""
