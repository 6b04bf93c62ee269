// Rounding, packing and unpacking of any binary float with 1..8 exponent bits, on float32 bits.
//
// One pass over memory stores a tensor: round, encode, count overflow and underflow, track the largest magnitude.
// Integer arithmetic throughout, so results do not depend on the compiler's floating-point options; the two
// float additions that round subnormals are exact by construction (see fxprec/numerics/codec.py).
/*CODEC*/
namespace {

constexpr int64_t kParallelFrom = 32768;

// Mirrors runtime/cpu/ops.py: Params.
struct Params {
  Format format;
  int32_t infinity;     // float32 bits that infinity becomes among the values
  int32_t carried;      // scale exponent of the incoming tensor
  float scale;          // 2^k
  float unscale;        // 2^-k of loaded codes
};

struct Stats { int64_t over; int64_t under; int32_t amax; };

template <typename Code, bool kCodes, bool kValues>
Stats store(const float* x, Code* codes, float* values, int64_t n, const Params p) {
  const Format f = p.format;
  int64_t over = 0, under = 0;
  int32_t amax = 0;
#pragma omp parallel for simd if (n > kParallelFrom) reduction(+ : over, under) reduction(max : amax) schedule(static)
  for (int64_t i = 0; i < n; ++i) {
    const int32_t raw = bits_of(x[i]) & kMagnitude;
    amax = raw > amax ? raw : amax;
    const float scaled = x[i] * p.scale;
    const int32_t a = bits_of(scaled) & kMagnitude;
    over += a >= f.overflow_threshold;
    under += (a > 0) & (a <= f.underflow_threshold);
    const Stored found = stored(scaled, f);
    if (kCodes) codes[i] = static_cast<Code>(found.code);
    if (kValues) {
      const int32_t infinity = p.infinity | (bits_of(scaled) & ~kMagnitude);
      values[i] = float_of(raw == kInfinity ? infinity : bits_of(found.value));
    }
  }
  return {over, under, amax};
}

template <typename Code>
void load(const Code* codes, float* values, int64_t n, const Params p) {
  const Format f = p.format;
#pragma omp parallel for simd if (n > kParallelFrom) schedule(static)
  for (int64_t i = 0; i < n; ++i) values[i] = numbers(static_cast<int32_t>(codes[i]), f) * p.unscale;
}

// counts: the first fields of numerics/stats.py: Counts; the moments are left unmeasured.
void report(double* counts, const Stats s, int64_t n, const Params& p) {
  counts[0] = static_cast<double>(s.over);
  counts[1] = static_cast<double>(s.under);
  counts[2] = float_of(s.amax);
  counts[3] = static_cast<double>(n);
  counts[4] = -1.0;
  counts[5] = counts[6] = counts[7] = 0.0;
  counts[8] = counts[9] = p.carried;
}

}  // namespace

extern "C" {

void fxprec_store8(const float* x, uint8_t* codes, float* values, double* counts, int64_t n, const Params* p) {
  report(counts, values ? store<uint8_t, true, true>(x, codes, values, n, *p)
                       : store<uint8_t, true, false>(x, codes, nullptr, n, *p), n, *p);
}

void fxprec_store16(const float* x, uint16_t* codes, float* values, double* counts, int64_t n, const Params* p) {
  report(counts, values ? store<uint16_t, true, true>(x, codes, values, n, *p)
                       : store<uint16_t, true, false>(x, codes, nullptr, n, *p), n, *p);
}

void fxprec_store32(const float* x, uint32_t* codes, float* values, double* counts, int64_t n, const Params* p) {
  report(counts, values ? store<uint32_t, true, true>(x, codes, values, n, *p)
                       : store<uint32_t, true, false>(x, codes, nullptr, n, *p), n, *p);
}

void fxprec_round(const float* x, float* values, double* counts, int64_t n, const Params* p) {
  report(counts, store<uint8_t, false, true>(x, nullptr, values, n, *p), n, *p);
}

void fxprec_load8(const uint8_t* codes, float* values, int64_t n, const Params* p) { load(codes, values, n, *p); }

void fxprec_load16(const uint16_t* codes, float* values, int64_t n, const Params* p) { load(codes, values, n, *p); }

void fxprec_load32(const uint32_t* codes, float* values, int64_t n, const Params* p) { load(codes, values, n, *p); }
}
