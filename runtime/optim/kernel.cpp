// One optimizer step over many tensors. The parts in capitals are printed by runtime/optim/cpp.py.
/*PRELUDE*/
#include <algorithm>
#include <vector>
namespace {

constexpr int64_t kChunk = 1 << 14;  // elements; also the most one thread takes at a time
constexpr int64_t kParallelFrom = 1 << 15;
constexpr int64_t kBlock = /*BLOCK*/;  // elements whose new states are all known before any is stored

struct Bfloat16 { uint16_t code; };
struct Float16 { uint16_t code; };

inline float load(const float& x) { return x; }
inline int32_t load(const uint8_t& x) { return x; }
inline float load(const Bfloat16& x) { return float_of(int32_t(uint32_t(x.code) << 16)); }
inline float load(const Float16& x) {
  const int32_t magnitude = int32_t(x.code & 0x7fff) << 13;
  const int32_t finite = bits_of(float_of(magnitude) * 0x1p112f);
  const int32_t value = magnitude < 0x0f800000 ? finite : magnitude | 0x7f800000;
  return float_of(value | int32_t(uint32_t(x.code & 0x8000) << 16));
}

// Values to store already are numbers of the format, or inf or NaN, so nothing is rounded here.
inline void store(float& to, float x) { to = x; }
inline void store(Bfloat16& to, float x) {
  const int32_t bits = bits_of(x);
  to.code = uint16_t((uint32_t(bits) >> 16) | ((bits & 0x7fffffff) > 0x7f800000 ? 0x40 : 0));
}
inline void store(Float16& to, float x) {
  const int32_t magnitude = bits_of(x) & 0x7fffffff;
  const int32_t finite = bits_of(float_of(magnitude) * 0x1p-112f) >> 13;
  const int32_t special = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
  to.code = uint16_t((magnitude < 0x7f800000 ? finite : special) | int32_t(uint32_t(bits_of(x) & ~0x7fffffff) >> 16));
}

struct Chunk { int64_t item, begin, end; };
struct Counts { int32_t nonzero, cancelled; };

FXPREC_NOINLINE Counts walk(const Chunk chunk, const int64_t* row, const float* scalars, const int32_t* integers) {
  /*POINTERS*/
  int32_t nonzeros = 0, cancelleds = 0;
  for (int64_t begin = chunk.begin; begin < chunk.end; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, chunk.end);
    /*BEGIN*/
#pragma omp simd reduction(+ : nonzeros, cancelleds)/*AMAX*/
    for (int64_t i = begin; i < end; ++i) {
      const int32_t index = int32_t(i);
      /*BODY*/
    }
/*END*/
  }
  return {nonzeros, cancelleds};
}

}  // namespace

// `table` (items, columns): number of elements, then the address of each tensor; `counts` (items, 2) or null.
extern "C" void fxprec_optim_step(int64_t items, const int64_t* table, const float* scalars, const int32_t* integers,
                                  int64_t* counts) {
  std::vector<Chunk> chunks;
  int64_t total = 0;
  for (int64_t item = 0; item < items; ++item) {
    const int64_t n = table[item * /*COLUMNS*/];
    total += n;
    for (int64_t at = 0; at < n; at += kChunk) chunks.push_back({item, at, at + kChunk < n ? at + kChunk : n});
  }
#pragma omp parallel for schedule(dynamic) if (total > kParallelFrom)
  for (int64_t c = 0; c < int64_t(chunks.size()); ++c) {
    const int64_t item = chunks[c].item;
    const Counts found = walk(chunks[c], table + item * /*COLUMNS*/, scalars + item * /*SCALARS*/,
                              integers + item * /*INTEGERS*/);
    if (counts) {
#pragma omp atomic
      counts[item * 2] += found.nonzero;
#pragma omp atomic
      counts[item * 2 + 1] += found.cancelled;
    }
  }
}
