// Transposes and converts matrices: y[b, c, r] = x[b, r, c]. Conversions are torch's own.
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <cstdint>

namespace {

using Bfloat16 = c10::BFloat16;

constexpr int64_t kParallelFrom = 32768;
constexpr int64_t kTile = 64;  // rows and columns of a tile, whose cache lines stay in L1 until they are used up

template <typename From, typename To>
void turn_column(const From* __restrict x, To* __restrict y, int64_t rows, int64_t stride) {
  if constexpr (sizeof(To) < sizeof(From)) {
    From column[kTile];  // torch rounds in vectors only if its input is contiguous
#pragma omp simd
    for (int64_t r = 0; r < rows; ++r) column[r] = x[r * stride];
    at::vec::convert(column, y, rows);
  } else {
#pragma omp simd
    for (int64_t r = 0; r < rows; ++r) y[r] = static_cast<To>(x[r * stride]);
  }
}

template <typename From, typename To>
void turn(const From* x, To* y, int64_t batch, int64_t rows, int64_t columns) {
  const int64_t across = (rows + kTile - 1) / kTile, down = (columns + kTile - 1) / kTile;
#pragma omp parallel for if (batch * rows * columns > kParallelFrom) schedule(static)
  for (int64_t tile = 0; tile < batch * across * down; ++tile) {
    const int64_t b = tile / (across * down), r0 = tile / down % across * kTile, c0 = tile % down * kTile;
    const int64_t height = r0 + kTile < rows ? kTile : rows - r0, width = c0 + kTile < columns ? kTile : columns - c0;
    const From* from = x + (b * rows + r0) * columns + c0;
    To* to = y + (b * columns + c0) * rows + r0;
    for (int64_t c = 0; c < width; ++c) turn_column(from + c, to + c * rows, height, columns);
  }
}

}  // namespace

extern "C" {

void fxprec_turn_32_32(const float* x, float* y, int64_t b, int64_t r, int64_t c) { turn(x, y, b, r, c); }
void fxprec_turn_32_16(const float* x, Bfloat16* y, int64_t b, int64_t r, int64_t c) { turn(x, y, b, r, c); }
void fxprec_turn_16_32(const Bfloat16* x, float* y, int64_t b, int64_t r, int64_t c) { turn(x, y, b, r, c); }
void fxprec_turn_16_16(const Bfloat16* x, Bfloat16* y, int64_t b, int64_t r, int64_t c) { turn(x, y, b, r, c); }
}
