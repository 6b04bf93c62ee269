// Block formats: one pass over memory finds a block's scale, encodes its elements and packs them; another decodes them.
// The arithmetic is printed from fxprec/numerics/block_codec.py; this file has the loops.
/*BLOCKS*/
namespace {

constexpr int64_t kParallelFrom = 32768;
constexpr int kMost = 4096;  // elements of a block

FXPREC_INLINE void put(uint8_t* at, int32_t code, int bytes) {
  at[0] = static_cast<uint8_t>(code);
  if (bytes == 2) at[1] = static_cast<uint8_t>(code >> 8);
}

FXPREC_INLINE int32_t get(const uint8_t* at, int bytes) { return bytes == 2 ? at[0] | at[1] << 8 : at[0]; }

// kCount codes of kBits fill kBytes.
template <int kBits, int kCount, int kBytes>
void pack_words(const int32_t* codes, uint8_t* out, int n) {
  for (int word = 0; word < n / kCount; ++word) {
    int32_t bits = 0;
    for (int i = 0; i < kCount; ++i) bits |= codes[word * kCount + i] << (kBits * i);
    for (int i = 0; i < kBytes; ++i) out[word * kBytes + i] = static_cast<uint8_t>(bits >> (8 * i));
  }
}

template <int kBits, int kCount, int kBytes>
void unpack_words(const uint8_t* in, int32_t* codes, int n) {
  for (int word = 0; word < n / kCount; ++word) {
    int32_t bits = 0;
    for (int i = 0; i < kBytes; ++i) bits |= in[word * kBytes + i] << (8 * i);
    for (int i = 0; i < kCount; ++i) codes[word * kCount + i] = (bits >> (kBits * i)) & ((1 << kBits) - 1);
  }
}

void pack(const int32_t* codes, uint8_t* out, const Blocks& b) {
  switch (b.bits) {
    case 1: return pack_words<1, 8, 1>(codes, out, b.block);
    case 2: return pack_words<2, 4, 1>(codes, out, b.block);
    case 4: return pack_words<4, 2, 1>(codes, out, b.block);
    case 6: return pack_words<6, 4, 3>(codes, out, b.block);
    default: return pack_words<8, 1, 1>(codes, out, b.block);
  }
}

void unpack(const uint8_t* in, int32_t* codes, const Blocks& b) {
  switch (b.bits) {
    case 1: return unpack_words<1, 8, 1>(in, codes, b.block);
    case 2: return unpack_words<2, 4, 1>(in, codes, b.block);
    case 4: return unpack_words<4, 2, 1>(in, codes, b.block);
    case 6: return unpack_words<6, 4, 3>(in, codes, b.block);
    default: return unpack_words<8, 1, 1>(in, codes, b.block);
  }
}

template <bool kRandom>
FXPREC_NOINLINE void encode_integers(const float* x, int32_t index, uint8_t* out, int32_t* codes, const Blocks b, int32_t seed) {
  const Format f = b.element;
  int32_t low = INT32_MAX, high = INT32_MIN;
#pragma omp simd reduction(min : low) reduction(max : high)
  for (int i = 0; i < b.block; ++i) {
    const int32_t key = ordered(bits_of(x[i]), f);
    low = key < low ? key : low;
    high = key > high ? key : high;
  }
  const Pair range = range_scale(ordered(low, f), ordered(high, f), b.largest, f);
  const float inverse = inverse_or_zero(range.first, 1.0f, f);
  put(out, (bits_of(range.first) >> 16) & 0xffff, 2);
  put(out + 2, (bits_of(range.second) >> 16) & 0xffff, 2);
#pragma omp simd
  for (int i = 0; i < b.block; ++i) {
    const int32_t random = kRandom ? random_bits(add(index, i), seed, f) : 0;
    codes[i] = kRandom ? dithered_integer(x[i], random, inverse, range.second, b.largest, f)
                       : integer(x[i], inverse, range.second, b.largest, f);
  }
}

template <bool kRandom>
FXPREC_NOINLINE void encode_floats(const float* x, int32_t index, uint8_t* out, int32_t* codes, const Blocks b, int32_t seed, float whole) {
  const Format f = b.element;
  int32_t amax = 0;
#pragma omp simd reduction(max : amax)
  for (int i = 0; i < b.block; ++i) {
    const int32_t magnitude = bits_of(x[i]) & kMagnitude;
    amax = magnitude > amax ? magnitude : amax;
  }
  int32_t scale;
  float inverse;
  if (b.is_power) {
    scale = power_scale(amax, b.largest_exponent, b.carry, f);
    inverse = power_inverse(scale, f);
  } else {
    scale = kRandom ? raised_scale(amax, whole, b.largest, b.scale) : nearest_scale(amax, whole, b.largest, b.scale);
    inverse = inverse_or_zero(numbers(scale, b.scale), whole, f);
  }
  put(out, scale, b.scale_bytes);
#pragma omp simd
  for (int i = 0; i < b.block; ++i) {
    const float element = x[i] * inverse;
    codes[i] = ::codes(element, f);
    if (kRandom) codes[i] = dithered_codes(element, random_bits(add(index, i), seed, f), f);
  }
}

template <bool kRandom>
void store(const float* x, uint8_t* out, int64_t n, const Blocks b, int32_t seed, float whole) {
  const int64_t blocks = (n + b.block - 1) / b.block;
  const int head = b.is_integer ? 4 : b.scale_bytes, record = head + b.block * b.bits / 8;
#pragma omp parallel for if (n > kParallelFrom) schedule(static)
  for (int64_t k = 0; k < blocks; ++k) {
    int32_t codes[kMost];
    float filled[kMost];
    const float* from = x + k * b.block;
    const int64_t left = n - k * b.block;
    if (left < b.block) {  // fill the block with copies of the last element
      for (int i = 0; i < b.block; ++i) filled[i] = from[i < left ? i : left - 1];
      from = filled;
    }
    const int32_t index = static_cast<int32_t>(k * b.block);
    uint8_t* at = out + k * record;
    if (b.is_integer) {
      encode_integers<kRandom>(from, index, at, codes, b, seed);
    } else {
      encode_floats<kRandom>(from, index, at, codes, b, seed, whole);
    }
    pack(codes, at + head, b);
  }
}

FXPREC_INLINE void write(float* at, float x, const Format&) { *at = x; }
FXPREC_INLINE void write(uint16_t* at, float x, const Format& f) {
  *at = static_cast<uint16_t>(static_cast<uint32_t>(bits_of(as_bfloat16(x, f))) >> 16);
}

template <typename Value>
FXPREC_NOINLINE void decode(const uint8_t* in, const int32_t* codes, Value* out, int n, const Blocks b, float whole) {
  const Format f = b.element;
  if (b.is_integer) {
    const float scale = float_of(get(in, 2) << 16), offset = float_of(get(in + 2, 2) << 16);
#pragma omp simd
    for (int i = 0; i < n; ++i) write(out + i, integer_number(codes[i], scale, offset, f), f);
    return;
  }
  const int32_t scale = get(in, b.scale_bytes);
  const Pair factors = b.is_power ? power_factors(scale, f) : Pair{numbers(scale, b.scale) * whole, 1.0f};
#pragma omp simd
  for (int i = 0; i < n; ++i) write(out + i, numbers(codes[i], f) * factors.first * factors.second, f);
}

template <typename Value>
void load(const uint8_t* in, Value* out, int64_t n, const Blocks b, float whole) {
  const int64_t blocks = (n + b.block - 1) / b.block;
  const int head = b.is_integer ? 4 : b.scale_bytes, record = head + b.block * b.bits / 8;
#pragma omp parallel for if (n > kParallelFrom) schedule(static)
  for (int64_t k = 0; k < blocks; ++k) {
    int32_t codes[kMost];
    const int64_t left = n - k * b.block;
    unpack(in + k * record + head, codes, b);
    decode(in + k * record, codes, out + k * b.block, left < b.block ? static_cast<int>(left) : b.block, b, whole);
  }
}

}  // namespace

extern "C" {

void fxprec_store_blocks(const float* x, uint8_t* out, int64_t n, const Blocks* b, const int32_t* seed, float whole) {
  if (seed) {
    store<true>(x, out, n, *b, *seed, whole);
  } else {
    store<false>(x, out, n, *b, 0, whole);
  }
}

void fxprec_load_blocks32(const uint8_t* in, float* out, int64_t n, const Blocks* b, float whole) {
  load(in, out, n, *b, whole);
}

void fxprec_load_blocks16(const uint8_t* in, uint16_t* out, int64_t n, const Blocks* b, float whole) {
  load(in, out, n, *b, whole);
}

}
