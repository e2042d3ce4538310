// The schemas of the operators in C++, for both devices. That of perturb is in
// multisample/_routes/torch_compile_perturb.py. Only cpu.cpp includes this file: a library defines a schema once.
#pragma once

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(multisample, m) {
  // seed and offset are the bits of unsigned integers. The kernel reads counter, one element, in place of offset.
  // counter is positional: with a keyword-only tensor, PyTorch registers neither derivatives nor batching rules.
  m.def(
      "sample_(Tensor(a!) out, Tensor mu, Tensor sigma, Tensor? counter=None, *, SymInt seed, SymInt offset=0, "
      "SymInt dim_offset=0, SymInt sample_offset=0, bool shared=False, bool fast_math=False, bool antithetic=False) -> "
      "()");
  m.def(
      "sample(Tensor mu, Tensor sigma, SymInt n, Tensor? counter=None, *, SymInt seed, SymInt offset=0, "
      "SymInt dim_offset=0, SymInt sample_offset=0, ScalarType? dtype=None, bool shared=False, bool fast_math=False, "
      "bool antithetic=False, bool transposed=False) -> Tensor");
  m.def(
      "sample_backward(Tensor grad, Tensor? counter=None, *, SymInt seed, SymInt offset=0, SymInt dim_offset=0, "
      "SymInt sample_offset=0, bool shared=False, bool fast_math=False, bool antithetic=False, "
      "bool transposed=False) -> (Tensor grad_mu, Tensor grad_sigma)");
  // A matrix for each key, which is a seed and an offset.
  m.def(
      "sample_batch(Tensor mu, Tensor sigma, SymInt n, Tensor keys, *, SymInt dim_offset=0, SymInt sample_offset=0, "
      "ScalarType? dtype=None, bool shared=False, bool fast_math=False, bool antithetic=False, "
      "bool transposed=False) -> Tensor");
  m.def(
      "sample_batch_backward(Tensor grad, Tensor keys, *, SymInt dim_offset=0, SymInt sample_offset=0, "
      "bool shared=False, bool fast_math=False, bool antithetic=False, bool transposed=False) -> "
      "(Tensor grad_mu, Tensor grad_sigma)");
}
