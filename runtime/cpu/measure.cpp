// Moments of a dense float32 tensor, in steps that measure.
/*PRELUDE*/
namespace {

constexpr int32_t kFraction = 0x007fffff;
constexpr int32_t kOne = 0x3f800000;
constexpr int64_t kParallelFrom = 32768;
constexpr int64_t kBlock = 1024;

// log2 of a magnitude's bits within 7e-6; subnormals count as 2^-127.
FXPREC_INLINE float log2_of(int32_t bits) {
  const float t = float_of((bits & kFraction) | kOne) - 1.0f;
  const float p = 0.44265944f + t * (-0.27672833f + t * (0.18486223f + t * (-0.09838764f + t * 0.02627305f)));
  return static_cast<float>((bits >> 23) - 127) + t + t * (1.0f - t) * p;
}

}  // namespace

extern "C" {

// out: sum of (x * unit)^2, number of non-zero elements, sum and sum of squares of log2|x| - shift over these.
void fxprec_moments(const float* x, double* out, int64_t n, float unit, float shift) {
  double squares = 0, logs = 0, log_squares = 0;
  int64_t nonzero = 0;
#pragma omp parallel for if (n > kParallelFrom) reduction(+ : squares, logs, log_squares, nonzero) schedule(static)
  for (int64_t start = 0; start < n; start += kBlock) {
    const int64_t stop = start + kBlock < n ? start + kBlock : n;
    float block_squares = 0, block_logs = 0, block_log_squares = 0;
    int32_t block_nonzero = 0;
#pragma omp simd reduction(+ : block_squares, block_logs, block_log_squares, block_nonzero)
    for (int64_t i = start; i < stop; ++i) {
      const int32_t a = bits_of(x[i]) & kMagnitude;
      const float y = x[i] * unit;
      const float log = a > 0 ? log2_of(a) - shift : 0.0f;
      block_squares += y * y;
      block_logs += log;
      block_log_squares += log * log;
      block_nonzero += a > 0;
    }
    squares += block_squares;
    logs += block_logs;
    log_squares += block_log_squares;
    nonzero += block_nonzero;
  }
  out[0] = squares;
  out[1] = static_cast<double>(nonzero);
  out[2] = logs;
  out[3] = log_squares;
}
}
