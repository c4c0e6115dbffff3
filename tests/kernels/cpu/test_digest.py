from pathlib import Path

import pytest

from moe_serve.kernels.cpu import digest
from moe_serve.kernels.cpu.digest import kernel_digest
from moe_serve.kernels.cpu.library import build_cpu_library
from tests.spills import spilling_loops


def test_avx2_and_any_number_of_threads_have_the_digest_of_avx512(library, avx2, use):
    wanted = kernel_digest()
    library.set_threads(2)
    assert kernel_digest() == wanted
    use(avx2)
    assert kernel_digest() == wanted


def test_with_16_registers_no_product_of_float32_weights_spills_its_sums_and_no_other_loop_more_than_constants(avx2):
    spills = spilling_loops(Path(avx2.call._name))
    assert not [function for function in spills if function.startswith("float32")]
    assert max(spills.values(), default=0) < 16, spills


def test_one_bit_of_any_kernel_changes_the_digest(monkeypatch):
    wanted = kernel_digest()
    for nth, probe in enumerate(digest.PROBES):
        for tensor in range(len(probe())):

            def flipped(probe=probe, tensor=tensor):
                results = [result.contiguous() for result in probe()]
                bits = results[tensor].numpy().reshape(-1).view("uint8")
                bits[0] ^= 1
                return results

            changed = (*digest.PROBES[:nth], flipped, *digest.PROBES[nth + 1 :])
            monkeypatch.setattr(digest, "PROBES", changed)
            assert kernel_digest() != wanted, (probe, tensor)
            monkeypatch.undo()


def test_probes_give_finite_numbers():
    assert all(tensor.isfinite().all() and tensor.any() for probe in digest.PROBES for tensor in probe())


@pytest.mark.slow  # builds the kernels once more
def test_without_fused_multiply_add_the_digest_is_another_one(avx2, use):
    wanted = kernel_digest()
    use(build_cpu_library(("-march=x86-64-v2",)))
    assert kernel_digest() != wanted
