#include "counters.h"

#include <algorithm>
#include <array>
#include <bit>
#include <map>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "faults.h"
#include "symbols.h"

namespace emu {

bool counting = false;

namespace {

constexpr size_t kSectorSize = 32;
constexpr size_t kWaveSize = 128;
constexpr size_t kBankSize = 4;

// One instruction of a warp. Offsets are from the start of the buffer, which in a device's memory
// is aligned to more than anything counted here.
struct Request {
  const Region* region = nullptr;
  uint32_t lanes = 0;
  std::array<size_t, kWarpSize> offset;
  std::array<uint32_t, kWarpSize> size;
};

// All that one instruction of the code has done in a warp since its lanes last met.
struct Requests {
  std::array<uint32_t, kWarpSize> next{};  // of each lane
  std::vector<Request> requests;
};

struct Key {
  uint16_t site;
  Access access;
  std::string buffer;
  auto operator<=>(const Key&) const = default;
};

struct Totals {
  bool shared = false;
  uint64_t requests = 0;
  uint64_t bytes = 0;
  uint64_t transactions = 0;  // sectors, or waves of shared memory
  uint64_t ideal = 0;
};

struct Launch {
  std::string site;
  dim3 grid;
  dim3 block;
  std::map<std::string, uint64_t> instructions;
  std::map<Key, Totals> totals;
};

struct Counters {
  std::vector<Launch> launches;
  std::vector<std::unordered_map<uint32_t, Requests>> warps;  // by site and access
};

Counters& counters() {
  static Counters& instance = *new Counters;
  return instance;
}

// The pieces of the bytes of some lanes, each [begin, end), without overlap.
std::vector<std::pair<size_t, size_t>> pieces(const Request& request, unsigned first,
                                              unsigned last) {
  std::vector<std::pair<size_t, size_t>> result;
  for (unsigned lane = first; lane < last; ++lane) {
    if (request.lanes >> lane & 1u) {
      result.emplace_back(request.offset[lane], request.offset[lane] + request.size[lane]);
    }
  }
  std::sort(result.begin(), result.end());
  size_t count = 0;
  for (const auto& piece : result) {
    if (count > 0 && piece.first <= result[count - 1].second) {
      result[count - 1].second = std::max(result[count - 1].second, piece.second);
    } else {
      result[count++] = piece;
    }
  }
  result.resize(count);
  return result;
}

uint64_t ceil_div(uint64_t a, uint64_t b) { return (a + b - 1) / b; }

uint64_t distinct_bytes(const std::vector<std::pair<size_t, size_t>>& all) {
  uint64_t sum = 0;
  for (const auto& [begin, end] : all) sum += end - begin;
  return sum;
}

void add_sectors(const Request& request, Totals& totals) {
  const auto all = pieces(request, 0, kWarpSize);
  size_t next = 0;  // the first sector not yet counted
  for (const auto& [begin, end] : all) {
    const size_t first = std::max(next, begin / kSectorSize);
    next = (end - 1) / kSectorSize + 1;
    totals.transactions += next - std::min(next, first);
  }
  totals.ideal += ceil_div(distinct_bytes(all), kSectorSize);
}

// Words of one bank take a wave each. Lanes that access 8 or 16 bytes come in halves or quarters.
void add_waves(const Request& request, Totals& totals) {
  const uint32_t widest = *std::max_element(request.size.begin(), request.size.end());
  const unsigned group = widest <= 4 ? 32 : widest <= 8 ? 16 : 8;
  for (unsigned first = 0; first < kWarpSize; first += group) {
    const auto all = pieces(request, first, first + group);
    if (all.empty()) continue;
    std::array<uint32_t, kWaveSize / kBankSize> words{};
    size_t next = 0;
    for (const auto& [begin, end] : all) {
      for (next = std::max(next, begin / kBankSize); next * kBankSize < end; ++next) {
        ++words[next % words.size()];
      }
    }
    totals.transactions += *std::max_element(words.begin(), words.end());
    totals.ideal += ceil_div(distinct_bytes(all), kWaveSize);
  }
}

void add(const Request& request, uint16_t site, Access access) {
  Totals& totals = counters().launches.back().totals[{site, access, request.region->name}];
  totals.shared = (request.region->flags & kSharedMemory) != 0;
  ++totals.requests;
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    if (request.lanes >> lane & 1u) totals.bytes += request.size[lane];
  }
  totals.shared ? add_waves(request, totals) : add_sectors(request, totals);
}

std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    result += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return result + "\"";
}

std::string triple(const dim3& extent) {
  return "[" + std::to_string(extent.x) + "," + std::to_string(extent.y) + "," +
         std::to_string(extent.z) + "]";
}

std::string as_json(const Launch& launch) {
  std::string instructions, lines;
  for (const auto& [name, amount] : launch.instructions) {
    instructions += (instructions.empty() ? "" : ",") + quoted(name) + ":" + std::to_string(amount);
  }
  std::vector<uint16_t> sites;
  for (const auto& [key, totals] : launch.totals) sites.push_back(key.site);
  const std::vector<Place> places = site_places(sites);
  size_t i = 0;
  for (const auto& [key, totals] : launch.totals) {
    std::string place;
    for (const std::string& line : places[i++]) place += (place.empty() ? "" : ",") + quoted(line);
    lines += std::string(lines.empty() ? "" : ",") + "{\"place\":[" + place +
             "],\"buffer\":" + quoted(key.buffer) +
             ",\"shared\":" + (totals.shared ? "true" : "false") +
             ",\"write\":" + (key.access == Access::kWrite ? "true" : "false") +
             ",\"requests\":" + std::to_string(totals.requests) +
             ",\"bytes\":" + std::to_string(totals.bytes) +
             ",\"transactions\":" + std::to_string(totals.transactions) +
             ",\"ideal\":" + std::to_string(totals.ideal) + "}";
  }
  return "{\"site\":" + quoted(launch.site) + ",\"grid\":" + triple(launch.grid) +
         ",\"block\":" + triple(launch.block) + ",\"instructions\":{" + instructions +
         "},\"lines\":[" + lines + "]}";
}

}  // namespace

void count(const char* instruction, uint64_t amount) {
  if (counting && in_fiber) counters().launches.back().instructions[instruction] += amount;
}

void start_counting() {
  counters().launches.clear();
  counting = true;
}

void stop_counting() { counting = false; }

std::string counters_as_json() {
  std::string text;
  for (const Launch& launch : counters().launches)
    text += (text.empty() ? "" : ",") + as_json(launch);
  return "[" + text + "]";
}

void count_access(const Region& region, const void* address, size_t size, Access access,
                  uint16_t site) {
  const unsigned thread = thread_rank(), lane = thread % kWarpSize;
  Requests& all =
      counters().warps[thread / kWarpSize][uint32_t{site} << 1 | (access == Access::kWrite)];
  const uint32_t index = all.next[lane]++;
  if (index == all.requests.size()) all.requests.emplace_back();
  Request& request = all.requests[index];
  if (request.region == nullptr) {
    request.region = &region;
    request.size.fill(0);
  }
  request.lanes |= 1u << lane;
  request.offset[lane] =
      static_cast<size_t>(static_cast<const unsigned char*>(address) - region.data);
  request.size[lane] = static_cast<uint32_t>(size);
}

void begin_counters(const LaunchShape& shape, const Site& site) {
  if (!counting) return;
  counters().launches.push_back({to_string(site), shape.grid, shape.block, {}, {}});
  counters().warps.assign((shape.block.count() + kWarpSize - 1) / kWarpSize, {});
}

void flush_counters(unsigned warp) {
  if (!counting) return;
  for (const auto& [key, all] : counters().warps[warp]) {
    for (const Request& request : all.requests) {
      add(request, static_cast<uint16_t>(key >> 1), key & 1 ? Access::kWrite : Access::kRead);
    }
  }
  counters().warps[warp].clear();
}

void flush_counters() {
  if (!counting) return;
  for (unsigned warp = 0; warp < counters().warps.size(); ++warp) flush_counters(warp);
}

}  // namespace emu
