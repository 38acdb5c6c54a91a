"""Host arrays on their way to a device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dsparkd.executor.upload import upload, upload_ids

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [np.int64, np.float32, np.float64])
def test_values_shape_and_type_are_kept(dtype: type) -> None:
    """Views that are not contiguous, and empty ones, too."""
    values = np.arange(24).reshape(4, 6).astype(dtype)
    for some in (values, values[:, ::2], values.T, values[:0]):
        got = upload(some, CPU)
        assert got.is_contiguous()
        assert np.array_equal(got.numpy(), some)
        assert got.numpy().dtype == dtype


def test_ids_come_from_any_collection() -> None:
    """Lists, tuples and sets of ids."""
    assert upload_ids([3, 1, 2], CPU).tolist() == [3, 1, 2]
    assert upload_ids((), CPU).dtype == torch.int64
    assert sorted(upload_ids({7, 5}, CPU).tolist()) == [5, 7]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_d07_the_host_goes_on_while_the_device_is_busy() -> None:
    """D-07: copies are queued behind a long kernel, and hold what the arrays held when they were made."""
    device = torch.device("cuda", 0)
    upload(np.zeros(5), device)
    busy = torch.cuda.Event()  # type: ignore[no-untyped-call]
    torch.cuda._sleep(400_000_000)  # type: ignore[no-untyped-call]
    busy.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        copies = []
        for number in range(200):
            values = np.full(5, float(number))
            copies.append(upload(values, device))
            values[:] = -1.0
            del values
        empty = upload(np.zeros((0, 3), np.int64), device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not busy.query(), "the host waited"  # type: ignore[no-untyped-call]
    assert empty.shape == (0, 3)
    assert [copy.tolist() for copy in copies] == [[float(number)] * 5 for number in range(200)]
