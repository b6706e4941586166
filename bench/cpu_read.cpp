// What reading memory costs and nothing else: the yardstick of bench/cpu_decode.py, which compiles
// it for the machine at hand.
#include <cstdint>
#include <cstring>

using Words = uint64_t __attribute__((vector_size(64)));

namespace {

// Four independent sums, so that adding never waits.
uint64_t read_piece(const char* data, int64_t bytes) {
  Words sums[4] = {};
  for (int64_t i = 0; i + 256 <= bytes; i += 256) {
    for (int j = 0; j < 4; ++j) {
      Words words;
      std::memcpy(&words, data + i + j * 64, 64);
      sums[j] += words;
    }
  }
  const Words sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  return sum[0] + sum[1] + sum[2] + sum[3] + sum[4] + sum[5] + sum[6] + sum[7];
}

}  // namespace

// Reads pieces of `piece_bytes` in the order of `pieces`.
extern "C" uint64_t read_pieces(const char* data, int64_t piece_bytes, const int64_t* pieces,
                                int64_t count) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < count; ++i)
    sum += read_piece(data + pieces[i] * piece_bytes, piece_bytes);
  return sum;
}
