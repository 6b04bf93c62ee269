// Matrix products with every product and every partial sum rounded: one pass, vectors along the columns of b.
//
// The same bits as runtime/arith/reference.py. No multiply and add is fused (-ffp-contract=off, and the roundings
// between them are integer operations).
/*CODEC*/
// Mirrors runtime/arith/cpu.py: Rounding and Task.
struct Rounding { Format format; int32_t exact; };
struct Task {
  const float *a, *b;
  float* out;
  int64_t m, k, n, chunk;
  Rounding product, sum;
};

namespace {

constexpr int64_t kLanes = 64;  // columns worked on at a time

// kPlain: formats saturate and have a mantissa bit to break ties, and no operand is inf or NaN.
template <bool kPlain>
FXPREC_INLINE float rounded(float x, const Rounding& r) {
  if (kPlain) return nearest_finite(x, r.format);
  return r.exact ? x : nearest(x, r.format);
}

FXPREC_INLINE float to_odd(float near, bool inexact, bool positive) {
  const int32_t bits = bits_of(near);
  const int32_t zero = (bits & kMagnitude) == 0;
  const int32_t base = zero ? (positive ? 0 : ~kMagnitude) : bits;
  const int32_t step = (zero | (positive == (bits >= 0))) ? 1 : -1;
  const bool finite = (bits & kMagnitude) < kInfinity;
  return float_of((inexact & finite & ((base & 1) == 0)) ? base + step : bits);
}

FXPREC_INLINE float product_to_odd(float a, float b) {
  const double exact = double(a) * double(b);
  const float near = float(exact);
  const double error = exact - double(near);
  return to_odd(near, (error > 0) | (error < 0), error > 0);
}

// All in 32-bit integers, which the compiler turns into vectors; a sum that rounds to zero is exact.
template <bool kPlain>
FXPREC_INLINE float sum_to_odd(float a, float b) {
  const float total = a + b;
  const float other = total - a;
  const int32_t bits = bits_of(total), error = bits_of((a - (total - other)) + (b - other));
  const int32_t inexact = (error & kMagnitude) != 0 ? ~bits & 1 : 0;
  const int32_t moved = kPlain || (bits & kMagnitude) < kInfinity ? inexact : 0;
  const int32_t step = ((bits ^ error) >> 31) | 1;  // away from zero if the error has the sum's sign
  return float_of(bits + (step & -moved));
}

template <bool kPlain, bool kOdd>
FXPREC_INLINE float plus(float a, float b, const Rounding& f) {
  return rounded<kPlain>(kOdd ? sum_to_odd<kPlain>(a, b) : a + b, f);
}

// s += p, with the compensation c if kKahan.
template <bool kPlain, bool kOdd, bool kKahan>
FXPREC_INLINE void accumulate(float& s, float& c, float p, const Rounding& f) {
  if (!kKahan) {
    s = plus<kPlain, kOdd>(s, p, f);
    return;
  }
  const float y = plus<kPlain, kOdd>(p, -c, f);
  const float t = plus<kPlain, kOdd>(s, y, f);
  c = plus<kPlain, kOdd>(plus<kPlain, kOdd>(t, -s, f), -y, f);
  s = t;
}

template <bool kPlain, bool kOddProduct, bool kOddSum, bool kKahan>
FXPREC_NOINLINE void row(const Task& task, int64_t i, int64_t column) {
  const Rounding fp = task.product, fs = task.sum;
  const int64_t width = task.n - column < kLanes ? task.n - column : kLanes;
  const int64_t chunk = task.chunk > 0 ? task.chunk : task.k + 1;
  float s[kLanes] = {}, c[kLanes] = {}, total[kLanes] = {}, total_c[kLanes] = {}, line[kLanes] = {};
  for (int64_t k = 0; k < task.k; ++k) {
    const float a = task.a[i * task.k + k];
    const float* b = task.b + k * task.n + column;
    if (width < kLanes) {
      for (int64_t j = 0; j < width; ++j) line[j] = b[j];
      b = line;
    }
#pragma omp simd
    for (int64_t j = 0; j < kLanes; ++j) {
      const float p = rounded<kPlain>(kOddProduct ? product_to_odd(a, b[j]) : a * b[j], fp);
      accumulate<kPlain, kOddSum, kKahan>(s[j], c[j], p, fs);
    }
    if ((k + 1) % chunk == 0 || (task.chunk > 0 && k + 1 == task.k)) {
#pragma omp simd
      for (int64_t j = 0; j < kLanes; ++j) {
        accumulate<kPlain, kOddSum, kKahan>(total[j], total_c[j], s[j], fs);
        s[j] = c[j] = 0;
      }
    }
  }
  const float* from = task.chunk > 0 ? total : s;
  for (int64_t j = 0; j < width; ++j) task.out[i * task.n + column + j] = from[j];
}

using Row = void (*)(const Task&, int64_t, int64_t);
template <bool kPlain, bool kOddProduct, bool kOddSum>
Row with_kahan(bool kahan) { return kahan ? row<kPlain, kOddProduct, kOddSum, true> : row<kPlain, kOddProduct, kOddSum, false>; }
template <bool kPlain, bool kOddProduct>
Row with_sum(bool odd, bool kahan) { return odd ? with_kahan<kPlain, kOddProduct, true>(kahan) : with_kahan<kPlain, kOddProduct, false>(kahan); }
template <bool kPlain>
Row with_product(bool odd, bool sum, bool kahan) { return odd ? with_sum<kPlain, true>(sum, kahan) : with_sum<kPlain, false>(sum, kahan); }

}  // namespace

extern "C" void fxprec_arith_matmul(const Task* task, int32_t plain, int32_t odd_product, int32_t odd_sum, int32_t kahan) {
  const Row run = plain ? with_product<true>(odd_product, odd_sum, kahan) : with_product<false>(odd_product, odd_sum, kahan);
  const int64_t columns = (task->n + kLanes - 1) / kLanes;
#pragma omp parallel for schedule(dynamic, 4) if (task->m * columns * task->k > 4096)
  for (int64_t at = 0; at < task->m * columns; ++at) run(*task, at / columns, at % columns * kLanes);
}
