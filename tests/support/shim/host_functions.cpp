// The device functions, compiled for the CPU and applied to arrays; for ctypes (stream_code.py).
#include "narrow.h"
#include "stream/normals.h"

using namespace multisample;

namespace {

Words words_at(u64 seed, u64 offset, u64 i, u64 g, u32 key1) {
  const RoundKeys keys = round_keys(seed, key1);
  return words(column_part(low(g), low(offset), high(offset), keys), row_part(low(i), low(offset), keys), keys);
}

template <class Real>
Real at(const Normals<Real>& z, u64 column) {
  const Real all[] = {z.z0, z.z1, z.z2, z.z3};
  return all[column % 4];
}

}  // namespace

extern "C" {

void stream_words(u64 size, const u64* seed, const u64* offset, const u64* i, const u64* g, u32* out) {
  for (u64 k = 0; k < size; ++k) {
    const Words w = words_at(seed[k], offset[k], i[k], g[k], kKey1);
    out[4 * k] = w.w0, out[4 * k + 1] = w.w1, out[4 * k + 2] = w.w2, out[4 * k + 3] = w.w3;
  }
}

void normals_float32(u64 size, const u64* seed, const u64* offset, const u64* i, const u64* j, float* out) {
  for (u64 k = 0; k < size; ++k) out[k] = at(normals(words_at(seed[k], offset[k], i[k], j[k] / 4, kKey1)), j[k]);
}

void normals_float64(u64 size, const u64* seed, const u64* offset, const u64* i, const u64* j, double* out) {
  for (u64 k = 0; k < size; ++k) {
    const Words w = words_at(seed[k], offset[k], i[k], j[k] / 4, kKey1);
    out[k] = at(normals(w, words_at(seed[k], offset[k], i[k], j[k] / 4, kKey1 ^ kFloat64Key)), j[k]);
  }
}

void transform_float32(u64 size, const u64* a, const u64* b, float* out) {
  for (u64 k = 0; k < size; ++k) {
    const Normals<float> z = normals(Words{0, 0, low(a[k]), low(b[k])});
    out[2 * k] = z.z2, out[2 * k + 1] = z.z3;
  }
}

void transform_float64(u64 size, const u64* a, const u64* b, double* out) {
  for (u64 k = 0; k < size; ++k) {
    const Normals<double> z = normals(Words{0, 0, high(a[k]), high(b[k])}, Words{0, 0, low(a[k]), low(b[k])});
    out[2 * k] = z.z2, out[2 * k + 1] = z.z3;
  }
}

void narrow_float16(u64 size, const float* x, u16* out) {
  for (u64 k = 0; k < size; ++k) out[k] = narrow<float16>(x[k]).bits;
}

void narrow_bfloat16(u64 size, const float* x, u16* out) {
  for (u64 k = 0; k < size; ++k) out[k] = narrow<bfloat16>(x[k]).bits;
}

void widen_float16(u64 size, const u16* x, float* out) {
  for (u64 k = 0; k < size; ++k) out[k] = widen(float16{x[k]});
}

void widen_bfloat16(u64 size, const u16* x, float* out) {
  for (u64 k = 0; k < size; ++k) out[k] = widen(bfloat16{x[k]});
}
}
