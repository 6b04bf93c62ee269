// Byte codes of gradients, one pass over memory each: largest magnitude, scale and encode, sum of coded rows, look-up.
//
// One thread each: the exchange runs its stages on threads of their own. Integer arithmetic decides every rounding.
#include <cstdint>
#include <cstring>

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("tree-loop-vectorize", "no-trapping-math")
#endif

namespace {
constexpr int32_t kMagnitude = 0x7fffffff;
constexpr int32_t kInfinity = 0x7f800000;
inline int32_t bits_of(float x) { int32_t b; std::memcpy(&b, &x, 4); return b; }
inline float float_of(int32_t b) { float x; std::memcpy(&x, &b, 4); return x; }
}  // namespace

// Mirrors runtime/aps/kernels.py: FormatConstants; the meaning of each is in runtime/cpu/params.py.
struct Format {
  int32_t shift, addend, parity, min_normal, magic, largest, code_adjust, over_code, nan_code, sign_shift;
};

extern "C" {

// Bits of the largest magnitude; above infinity's where there is a NaN.
int32_t aps_largest(const float* x, int64_t n) {
  int32_t largest = 0;
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < n; ++i) {
    const int32_t a = bits_of(x[i]) & kMagnitude;
    largest = a > largest ? a : largest;
  }
  return largest;
}

// Codes of x * first * second, nearest even.
void aps_encode(const float* x, uint8_t* codes, int64_t n, float first, float second, const Format* format) {
  const Format p = *format;
  const float magic = float_of(p.magic);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const int32_t bits = bits_of(x[i] * first * second);
    const int32_t a = bits & kMagnitude;
    const int32_t r = (a + p.addend + ((a >> p.shift) & 1) * p.parity) >> p.shift << p.shift;
    const bool small = a < p.min_normal;
    const int32_t subnormal = bits_of(float_of(small ? a : p.min_normal) + magic) - p.magic;
    int32_t code = small ? subnormal : (r >> p.shift) - p.code_adjust;
    code = (!small & (r > p.largest)) ? p.over_code : code;
    code = a > kInfinity ? p.nan_code : code;
    codes[i] = static_cast<uint8_t>(code | static_cast<int32_t>(static_cast<uint32_t>(bits & ~kMagnitude) >> p.sign_shift));
  }
}

// Codes of x * first * second in a table of 128 magnitudes. The upper 15 bits of the magnitude name a cell with at most
// one border in it: `below` is the code up to the border, `above` the one past it.
void aps_encode_table(const float* x, uint8_t* codes, int64_t n, float first, float second, const uint8_t* below,
                      const uint8_t* above, const float* borders) {
  for (int64_t i = 0; i < n; ++i) {
    const int32_t bits = bits_of(x[i] * first * second);
    const int32_t a = bits & kMagnitude;
    const int32_t cell = a >> 16;
    const uint8_t low = below[cell];
    const uint8_t code = float_of(a) > borders[low] ? above[cell] : low;
    codes[i] = code | static_cast<uint8_t>(static_cast<uint32_t>(bits & ~kMagnitude) >> 24);
  }
}

// total = table[row 0] + table[row 1] + ..., in this order.
void aps_sum(const uint8_t* rows, int64_t num_rows, int64_t n, const float* table, float* total) {
  constexpr int64_t kBlock = 4096;
  for (int64_t start = 0; start < n; start += kBlock) {
    const int64_t end = start + kBlock < n ? start + kBlock : n;
    for (int64_t i = start; i < end; ++i) total[i] = num_rows ? table[rows[i]] : 0.0f;
    for (int64_t r = 1; r < num_rows; ++r) {
      const uint8_t* row = rows + r * n;
      for (int64_t i = start; i < end; ++i) total[i] += table[row[i]];
    }
  }
}

// values = table[codes].
void aps_look_up(const uint8_t* codes, int64_t n, const float* table, float* values) {
  for (int64_t i = 0; i < n; ++i) values[i] = table[codes[i]];
}
}
