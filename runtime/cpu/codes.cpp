// Counts what storing tensors has lost, from their codes.
/*CODEC*/
namespace {

constexpr int64_t kParallelFrom = 1 << 18;
constexpr int64_t kLanes = 64;
constexpr int64_t kBlock = 255 * kLanes;  // a lane of bytes counts to 255

// As runtime/cpu/codes.py writes it.
struct Codes {
  const void* codes;
  int64_t numel;
  const Format* format;
  int64_t bytes;  // of a code
  int64_t exp;  // exponent of the scale with which they are stored
};

struct Found { int64_t over; int32_t largest; };

template <typename Code>
Found count_block(const Code* codes, int64_t n, const Code mask, const Code limit) {
  Code over[kLanes] = {}, largest[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int64_t j = 0; j < kLanes; ++j) {
      const Code magnitude = codes[i + j] & mask;
      over[j] += magnitude >= limit;
      largest[j] = magnitude > largest[j] ? magnitude : largest[j];
    }
  }
  Found found = {0, 0};
  for (int64_t j = 0; j < kLanes; ++j) {
    found.over += over[j];
    found.largest = largest[j] > found.largest ? largest[j] : found.largest;
  }
  for (; i < n; ++i) {
    const Code magnitude = codes[i] & mask;
    found.over += magnitude >= limit;
    found.largest = magnitude > found.largest ? magnitude : found.largest;
  }
  return found;
}

template <typename Code>
Found count(const Code* codes, int64_t n, const Format& f) {
  const Code mask = static_cast<Code>(f.mask), limit = static_cast<Code>(f.overflow_code);
  int64_t over = 0;
  int32_t largest = 0;
#pragma omp parallel for if (n > kParallelFrom) reduction(+ : over) reduction(max : largest) schedule(static)
  for (int64_t start = 0; start < n; start += kBlock) {
    const Found found = count_block(codes + start, n - start < kBlock ? n - start : kBlock, mask, limit);
    over += found.over;
    largest = found.largest > largest ? found.largest : largest;
  }
  return {over, largest};
}

}  // namespace

extern "C" {

// rows: numerics/stats.py: Counts, one row a tensor; underflow and moments are left unmeasured.
void fxprec_count_codes(const Codes* tensors, int64_t num_tensors, double* rows) {
  for (int64_t t = 0; t < num_tensors; ++t, rows += 10) {
    const Codes& c = tensors[t];
    const Format& f = *c.format;
    const Found found = c.bytes == 1 ? count(static_cast<const uint8_t*>(c.codes), c.numel, f)
                                     : count(static_cast<const uint16_t*>(c.codes), c.numel, f);
    rows[0] = static_cast<double>(found.over);
    rows[1] = __builtin_nan("");
    rows[2] = numbers(found.largest, f);
    rows[3] = static_cast<double>(c.numel);
    rows[4] = -1.0;
    rows[5] = rows[6] = rows[7] = 0.0;
    rows[8] = rows[9] = static_cast<double>(c.exp);
  }
}
}
