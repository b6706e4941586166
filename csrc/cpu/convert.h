// Number formats of the cache on a CPU. Branch-free, so that loops over rows vectorise. Included
// once for each instruction-set level, inside its namespace: see cpu/kernels.cpp.

template <DType kType>
struct Storage {
  using Type = uint8_t;
};
template <>
struct Storage<DType::kF32> {
  using Type = float;
};
template <>
struct Storage<DType::kF16> {
  using Type = uint16_t;
};
template <>
struct Storage<DType::kBf16> {
  using Type = uint16_t;
};
template <>
struct Storage<DType::kI8> {
  using Type = int8_t;
};

inline float from_bits(uint32_t bits) { return __builtin_bit_cast(float, bits); }
inline uint32_t to_bits(float x) { return __builtin_bit_cast(uint32_t, x); }
inline float larger(float a, float b) { return a > b ? a : b; }
inline bool is_nan(float x) { return x != x; }

// A format of 1 sign, kExponent exponent and kMantissa mantissa bits. A subnormal is read as the
// mantissa of the smallest normal, less that normal: exact, and right where denormals are flushed.
template <int kExponent, int kMantissa>
float widen(uint32_t bits) {
  constexpr int kBias = (1 << (kExponent - 1)) - 1;
  constexpr uint32_t kSign = 1u << (kExponent + kMantissa);
  constexpr uint32_t kSmallestNormal = static_cast<uint32_t>(128 - kBias) << 23;
  const uint32_t magnitude = (bits & (kSign - 1)) << (23 - kMantissa);
  const float normal = from_bits(magnitude + (static_cast<uint32_t>(127 - kBias) << 23));
  const float subnormal = from_bits(magnitude + kSmallestNormal) - from_bits(kSmallestNormal);
  const float value = magnitude < 1u << 23 ? subnormal : normal;
  return from_bits(to_bits(value) | (bits & kSign) << (31 - kExponent - kMantissa));
}

template <DType kType>
float load(typename Storage<kType>::Type stored) {
  if constexpr (kType == DType::kF32) {
    return stored;
  } else if constexpr (kType == DType::kBf16) {
    return from_bits(static_cast<uint32_t>(stored) << 16);
  } else if constexpr (kType == DType::kI8) {
    return static_cast<float>(stored);
  } else if constexpr (kType == DType::kF8E4m3) {
    const float value = widen<4, 3>(stored);
    return (stored & 0x7f) == 0x7f ? from_bits(0x7fc00000u) : value;  // no infinities
  } else {
    // Half, and e5m2, which is the upper byte of one. Infinities and NaN keep their exponent full.
    const uint32_t half = kType == DType::kF16 ? stored : static_cast<uint32_t>(stored) << 8;
    const uint32_t full = (half & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
    return from_bits(to_bits(widen<5, 10>(half)) | full);
  }
}

// Round to nearest, ties to even, of a magnitude that is not NaN; overflow counts on upwards
// through the exponent, so that it reaches the bits of infinity.
template <int kExponent, int kMantissa>
uint32_t narrow(float magnitude) {
  constexpr int kBias = (1 << (kExponent - 1)) - 1;
  constexpr int kDropped = 23 - kMantissa;
  constexpr uint32_t kSmallestNormal = static_cast<uint32_t>(128 - kBias) << 23;
  // Adding this leaves a subnormal's mantissa, rounded, in the lowest bits.
  constexpr uint32_t kMagic = static_cast<uint32_t>(128 - kBias + kDropped) << 23;
  const uint32_t bits = to_bits(magnitude);
  if (bits < kSmallestNormal) return to_bits(magnitude + from_bits(kMagic)) - kMagic;
  const uint32_t rounded = bits + (1u << (kDropped - 1)) - 1 + (bits >> kDropped & 1);
  return (rounded - (static_cast<uint32_t>(127 - kBias) << 23)) >> kDropped;
}

template <DType kType>
typename Storage<kType>::Type store(float x) {
  const uint32_t sign = to_bits(x) >> 31;
  const float magnitude = from_bits(to_bits(x) & 0x7fffffffu);
  if constexpr (kType == DType::kF32) {
    return x;
  } else if constexpr (kType == DType::kBf16) {
    if (is_nan(x)) return static_cast<uint16_t>(sign << 15 | 0x7fc0u);
    const uint32_t bits = to_bits(x);
    return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
  } else if constexpr (kType == DType::kF16) {
    if (is_nan(x)) return static_cast<uint16_t>(sign << 15 | 0x7e00u);
    const float capped = magnitude < 65536.f ? magnitude : 65536.f;
    return static_cast<uint16_t>(sign << 15 | narrow<5, 10>(capped));
  } else if constexpr (kType == DType::kI8) {
    if (is_nan(x)) return 0;
    const float capped = magnitude < 128.f ? x : (sign ? -128.f : 127.f);
    const float rounded = __builtin_nearbyintf(capped);
    return static_cast<int8_t>(rounded > 127.f ? 127.f : rounded);
  } else {
    // 8-bit floats saturate, infinities too; NaN stays NaN.
    if (is_nan(x)) return static_cast<uint8_t>(sign << 7 | 0x7fu);
    const float capped = magnitude < max_value(kType) ? magnitude : max_value(kType);
    const uint32_t bits = kType == DType::kF8E4m3 ? narrow<4, 3>(capped) : narrow<5, 2>(capped);
    return static_cast<uint8_t>(sign << 7 | bits);
  }
}

// Row `offset` elements into `base`, as floats.
template <DType kType>
void load_row(const void* base, int64_t offset, int count, float* row) {
  const auto* stored = static_cast<const typename Storage<kType>::Type*>(base) + offset;
  for (int i = 0; i < count; ++i) row[i] = load<kType>(stored[i]);
}

template <DType kType>
void store_row(void* base, int64_t offset, int count, const float* row) {
  auto* stored = static_cast<typename Storage<kType>::Type*>(base) + offset;
  for (int i = 0; i < count; ++i) stored[i] = store<kType>(row[i]);
}
