// The device functions, compiled for the CPU and applied to arrays; for ctypes.
#include "stream/normals.h"
#include "stream/rounding.h"

using namespace multisample;

namespace {

Words words_at(u64 seed, u64 offset, u32 i, u32 g, u32 key1) {
  const RoundKeys keys = round_keys(seed, key1);
  return words(column_part(g, low(offset), high(offset), keys), row_part(i, low(offset), keys), keys);
}

template <class Real>
void put(const Normals<Real>& z, Real* to) {
  to[0] = z.z0, to[1] = z.z1, to[2] = z.z2, to[3] = z.z3;
}

}  // namespace

extern "C" {

// `fine` selects the second block, which float64 uses.
void draw_words(u64 size, const u64* seed, const u64* offset, const u32* i, const u32* g, int fine, u32* out) {
  for (u64 k = 0; k < size; ++k) {
    const Words w = words_at(seed[k], offset[k], i[k], g[k], fine ? kKey1 ^ kFloat64Key : kKey1);
    out[4 * k] = w.w0, out[4 * k + 1] = w.w1, out[4 * k + 2] = w.w2, out[4 * k + 3] = w.w3;
  }
}

void transform_f32(u64 size, const u32* w, float* out) {
  for (u64 k = 0; k < 4 * size; k += 4) put(normals(Words{w[k], w[k + 1], w[k + 2], w[k + 3]}), out + k);
}

void transform_f64(u64 size, const u32* w, const u32* f, double* out) {
  for (u64 k = 0; k < 4 * size; k += 4) {
    put(normals(Words{w[k], w[k + 1], w[k + 2], w[k + 3]}, Words{f[k], f[k + 1], f[k + 2], f[k + 3]}), out + k);
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
