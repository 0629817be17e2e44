"""The copies that are timed are the right copies; what runs on a GPU is run here on the CPU, as far as that goes."""

import torch

from benchmarks import gather_scatter
from benchmarks.gather_scatter import Model, declared, measure, measured, packed, slowest
from lmcache_connector.gpu_connector import slot_planes
from lmcache_server.protocol.layout import slot_bytes

CPU = torch.device("cpu")
SMALL = Model(layers=2, heads=2, size=64, tokens=512)
"""Two chunks in four blocks."""


def test_every_layout_is_measured_in_both_directions() -> None:
    rows, shares = measured(packed(SMALL) | declared(SMALL, CPU), SMALL, CPU, repeats=2)
    assert len(shares) >= 2 * len(declared(SMALL, CPU))
    assert {len(share) for share in shares.values()} == {2}
    assert len(rows) >= len(shares)


def test_what_is_timed_moves_every_token() -> None:
    """After the gather all slots hold the pages, and the scatter has put the same bytes back."""
    for make in declared(SMALL, CPU).values():
        copier, group = make()
        slots = torch.zeros(2, slot_bytes(group, 256), dtype=torch.uint8)
        before = [page.clone() for page in copier._tables[0].units] if hasattr(copier, "_tables") else []
        samples = measure(copier, slots, SMALL, CPU, repeats=1)
        assert set(samples) == {"gather", "scatter", "plain gather", "plain scatter"}
        assert slots.any(dim=1).all(), "no slot was left out"
        assert all(slot_planes(slot, group).view(torch.uint8).any() for slot in slots)
        after = list(copier._tables[0].units) if before else []
        assert all(map(torch.equal, before, after))


def test_a_kernel_that_this_machine_does_not_have_is_a_row_without_numbers() -> None:
    def make() -> gather_scatter.Made:
        raise RuntimeError("no such instructions")

    assert measured({"AMX": make}, SMALL, CPU, repeats=1) == ([["AMX", "-", "-", "no such instructions"]], {})


def test_the_budget_is_that_of_the_slowest_copy() -> None:
    shares = {"a": [0.95, 0.96, 0.97], "b": [0.99, 0.91, 0.92]}
    assert slowest(shares) == {"gpu_copies": {"ours": [0.99, 0.91, 0.92]}}
