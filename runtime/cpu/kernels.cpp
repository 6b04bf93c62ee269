// Rounding, packing and unpacking of any binary float with 1..8 exponent bits, on float32 bits.
//
// One pass over memory stores a tensor: round, encode, count overflow and underflow, track the largest magnitude.
// Integer arithmetic throughout, so results do not depend on the compiler's floating-point options; the two
// float additions that round subnormals are exact by construction (see fxprec/numerics/codec.py).
#include <cstdint>
#include <cstring>

#if defined(__GNUC__) && !defined(__clang__)
// Inductor switches both off: its own loops are written in vectors.
#pragma GCC optimize("tree-loop-vectorize", "no-trapping-math")
#endif

namespace {

constexpr int32_t kMagnitude = 0x7fffffff;
constexpr int32_t kInfinity = 0x7f800000;
constexpr int64_t kParallelFrom = 32768;

inline int32_t bits_of(float x) { int32_t b; std::memcpy(&b, &x, 4); return b; }
inline float float_of(int32_t b) { float x; std::memcpy(&x, &b, 4); return x; }

// Mirrors runtime/cpu/ops.py: Params.
struct Params {
  int32_t shift;        // mantissa bits dropped from float32
  int32_t addend;       // half a unit of the kept mantissa, less one where parity is 1
  int32_t parity;       // how the last kept bit enters a tie: 1 added, -1 subtracted, 0 not at all
  int32_t min_normal;   // float32 bits from which a magnitude is rounded as a normal number
  int32_t magic;        // float32 bits of 2^(emin - M + 23)
  int32_t largest;      // float32 bits of the largest number
  int32_t over;         // float32 bits an overflow becomes
  int32_t over_from;    // float32 bits from which a magnitude overflows
  int32_t under_to;     // float32 bits up to which a magnitude underflows
  int32_t code_adjust;  // exponent offset between float32 and the format, in code units
  int32_t over_code;    // code magnitude of an overflow
  int32_t nan_code;     // code magnitude of NaN
  int32_t sign_shift;   // from float32's sign bit to the code's
  int32_t inf_code;     // code magnitude of infinity, or -1
  int32_t nan_from;     // smallest code magnitude that is NaN, or INT32_MAX
  int32_t infinity;     // float32 bits that infinity becomes among the values
  float quantum;        // smallest subnormal
  float scale;          // 2^k
  float unscale;        // of what is loaded, or of the statistics
};

struct Stats { int64_t over; int64_t under; int32_t amax; };

template <typename Code, bool kCodes, bool kValues>
Stats store(const float* x, Code* codes, float* values, int64_t n, const Params p) {
  int64_t over = 0, under = 0;
  int32_t amax = 0;
  const float magic = float_of(p.magic);
#pragma omp parallel for simd if (n > kParallelFrom) reduction(+ : over, under) reduction(max : amax) schedule(static)
  for (int64_t i = 0; i < n; ++i) {
    const int32_t raw = bits_of(x[i]);
    amax = (raw & kMagnitude) > amax ? (raw & kMagnitude) : amax;
    const int32_t bits = bits_of(x[i] * p.scale);
    const int32_t a = bits & kMagnitude;
    over += a >= p.over_from;
    under += (a > 0) & (a <= p.under_to);
    const int32_t normal = ((a + p.addend + ((a >> p.shift) & 1) * p.parity) >> p.shift) << p.shift;
    const int32_t shifted = bits_of(float_of(a < p.min_normal ? a : p.min_normal) + magic);
    const int32_t subnormal = bits_of(float_of(shifted) - magic);
    const bool is_small = a < p.min_normal;
    int32_t r = is_small ? subnormal : normal;
    const bool is_over = r > p.largest;
    const bool is_nan = a > kInfinity;
    if (kCodes) {
      int32_t code = is_small ? shifted - p.magic : (r >> p.shift) - p.code_adjust;
      code = is_over ? p.over_code : code;
      code = is_nan ? p.nan_code : code;
      codes[i] = static_cast<Code>(code | static_cast<int32_t>(static_cast<uint32_t>(bits & ~kMagnitude) >> p.sign_shift));
    }
    if (kValues) {
      r = is_over ? p.over : r;
      r = (raw & kMagnitude) == kInfinity ? p.infinity : r;
      r = is_nan ? a : r;
      values[i] = float_of(r | (bits & ~kMagnitude));
    }
  }
  return {over, under, amax};
}

template <typename Code>
void load(const Code* codes, float* values, int64_t n, const Params p) {
  const int32_t mask = (1 << (31 - p.sign_shift)) - 1;
  const int32_t implicit = 1 << (23 - p.shift);
  const int32_t adjust = p.code_adjust << p.shift;
#pragma omp parallel for simd if (n > kParallelFrom) schedule(static)
  for (int64_t i = 0; i < n; ++i) {
    const int32_t code = codes[i];
    const int32_t m = code & mask;
    const int32_t small = bits_of(static_cast<float>(m) * p.quantum);
    int32_t r = m < implicit ? small : (m << p.shift) + adjust;
    r = m == p.inf_code ? kInfinity : r;
    r = m >= p.nan_from ? 0x7fc00000 : r;
    const int32_t sign = static_cast<int32_t>(static_cast<uint32_t>(code & ~mask) << p.sign_shift);
    values[i] = float_of(r | sign) * p.unscale;
  }
}

// stats: symbolic.STATS, the moments left unmeasured; amax is given without the scale it carries.
void report(float* stats, const Stats s, int64_t n, const Params& p) {
  stats[0] = n ? static_cast<float>(static_cast<double>(s.over) / n) : 0.0f;
  stats[1] = n ? static_cast<float>(static_cast<double>(s.under) / n) : 0.0f;
  stats[2] = float_of(s.amax) * p.unscale;
  stats[4] = -1.0f;
  stats[3] = stats[5] = stats[6] = 0.0f;
}

}  // namespace

extern "C" {

void fxprec_store8(const float* x, uint8_t* codes, float* values, float* stats, int64_t n, const Params* p) {
  report(stats, values ? store<uint8_t, true, true>(x, codes, values, n, *p)
                       : store<uint8_t, true, false>(x, codes, nullptr, n, *p), n, *p);
}

void fxprec_store16(const float* x, uint16_t* codes, float* values, float* stats, int64_t n, const Params* p) {
  report(stats, values ? store<uint16_t, true, true>(x, codes, values, n, *p)
                       : store<uint16_t, true, false>(x, codes, nullptr, n, *p), n, *p);
}

void fxprec_store32(const float* x, uint32_t* codes, float* values, float* stats, int64_t n, const Params* p) {
  report(stats, values ? store<uint32_t, true, true>(x, codes, values, n, *p)
                       : store<uint32_t, true, false>(x, codes, nullptr, n, *p), n, *p);
}

void fxprec_round(const float* x, float* values, float* stats, int64_t n, const Params* p) {
  report(stats, store<uint8_t, false, true>(x, nullptr, values, n, *p), n, *p);
}

void fxprec_load8(const uint8_t* codes, float* values, int64_t n, const Params* p) { load(codes, values, n, *p); }

void fxprec_load16(const uint16_t* codes, float* values, int64_t n, const Params* p) { load(codes, values, n, *p); }

void fxprec_load32(const uint32_t* codes, float* values, int64_t n, const Params* p) { load(codes, values, n, *p); }
}
