// Loops over byte codes of gradients, one pass over memory each: largest magnitude, scale and encode, sum, look-up.
//
// Each uses one thread, because the exchange runs its stages on threads of their own. Integer arithmetic rounds.
/*CODEC*/
extern "C" {

// Returns the bits of the largest magnitude, above those of infinity if there is a NaN.
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
void aps_encode(const float* x, uint8_t* out, int64_t n, float first, float second, const Format* format) {
  const Format f = *format;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<uint8_t>(codes(x[i] * first * second, f));
}

// Codes of x * first * second in a table of 128 magnitudes. The upper 15 bits of the magnitude select a cell with at
// most one border in it: `below` is the code up to the border, `above` the code past it.
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

// Multiplies each block of x by `before`, the Hadamard matrix, and `after`. A stage adds and subtracts the halves and
// interleaves the results, so the next stage's halves are those of the next bit. The last results are in the matrix's
// order.
void aps_hadamard(float* x, int64_t n, int64_t block, const float* before, const float* after) {
  float buffers[2][4096];
  const int64_t half = block / 2;
  for (float* at = x; at < x + n; at += block) {
    float* from = buffers[0];
    float* to = buffers[1];
    for (int64_t i = 0; i < block; ++i) from[i] = at[i] * before[i];
    for (int64_t left = block; left > 1; left /= 2) {
#pragma omp simd
      for (int64_t i = 0; i < half; ++i) {
        const float upper = from[i], lower = from[i + half];
        to[2 * i] = upper + lower;
        to[2 * i + 1] = upper - lower;
      }
      float* const done = from;
      from = to;
      to = done;
    }
    for (int64_t i = 0; i < block; ++i) at[i] = from[i] * after[i];
  }
}
}
