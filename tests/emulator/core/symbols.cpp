#include "symbols.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <unordered_map>
#include <utility>

#include "random.h"

namespace emu {
namespace {

struct SiteEntry {
  const void* pc;
  bool has_site;
  Site site;
};

struct Tables {
  std::unordered_map<const void*, Place> places;
  std::unordered_map<uint64_t, uint16_t> sites_by_key;
  std::vector<SiteEntry> sites;
};

// Never destroyed: kernels may run while the process exits.
Tables& tables() {
  static Tables& instance = *new Tables;
  return instance;
}

struct Instruction {
  const void* address;
  uintptr_t offset;  // in its library
};

// What lies between a kernel and an access, or above a kernel; asked for is what a kernel does.
bool is_emulator(const std::string& line) {
  return line.find("/emulator/core/") != std::string::npos ||
         line.find("/emulator/include/") != std::string::npos ||
         line.find("/include/c++/") != std::string::npos;
}

// Names are relative to the directory of the build: see -fdebug-prefix-map in build.py.
std::string shorten(std::string line) {
  if (line.starts_with("./")) line.erase(0, 2);
  if (const size_t discriminator = line.find(" ("); discriminator != std::string::npos) {
    line.resize(discriminator);
  }
  return line;
}

std::string quoted(const std::string& text) {
  std::string result = "'";
  for (const char c : text) result += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return result + "'";
}

void symbolise(const std::string& library, const std::vector<Instruction>& instructions) {
  std::string command = "addr2line -a -i -e " + quoted(library);
  for (const Instruction& instruction : instructions) {
    char text[32];
    std::snprintf(text, sizeof text, " 0x%zx", static_cast<size_t>(instruction.offset));
    command += text;
  }
  FILE* pipe = popen((command + " 2>/dev/null").c_str(), "r");
  if (pipe == nullptr) return;
  std::array<char, 4096> buffer;
  size_t current = ~size_t{0};
  while (std::fgets(buffer.data(), buffer.size(), pipe) != nullptr) {
    std::string line(buffer.data(), std::strcspn(buffer.data(), "\n"));
    if (line.starts_with("0x")) {
      ++current;
      continue;
    }
    if (current >= instructions.size() || line.starts_with("??")) continue;
    line = shorten(std::move(line));
    if (!is_emulator(line)) tables().places[instructions[current].address].push_back(line);
  }
  pclose(pipe);
}

std::string base_name(const char* path) {
  const char* slash = std::strrchr(path, '/');
  return slash ? slash + 1 : path;
}

}  // namespace

std::vector<Place> find_places(const std::vector<const void*>& addresses) {
  Tables& known = tables();
  std::map<std::string, std::vector<Instruction>> missing;
  for (const void* address : addresses) {
    if (!known.places.try_emplace(address).second) continue;
    Dl_info info{};
    if (dladdr(address, &info) == 0 || info.dli_fname == nullptr) continue;
    const auto base = reinterpret_cast<uintptr_t>(info.dli_fbase);
    // A return address: the call before it is meant.
    missing[info.dli_fname].push_back({address, reinterpret_cast<uintptr_t>(address) - base - 1});
  }
  // A command line has a limit.
  constexpr size_t kBatch = 4096;
  for (const auto& [library, instructions] : missing) {
    for (size_t first = 0; first < instructions.size(); first += kBatch) {
      const size_t last = std::min(first + kBatch, instructions.size());
      symbolise(library, {instructions.begin() + static_cast<std::ptrdiff_t>(first),
                          instructions.begin() + static_cast<std::ptrdiff_t>(last)});
    }
  }
  std::vector<Place> result;
  for (const void* address : addresses) result.push_back(known.places[address]);
  return result;
}

std::string to_string(const Place& place) {
  std::string text;
  for (const std::string& line : place) text += (text.empty() ? "" : " < ") + line;
  return text;
}

uint16_t intern_site(const void* pc, const Site* site) {
  struct CacheLine {
    uint64_t key = 0;
    uint16_t number = 0;
  };
  static std::array<CacheLine, 4096> cache;

  // One instruction of the emulator acts for many places in kernels.
  uint64_t key = mix(reinterpret_cast<uintptr_t>(pc));
  if (site != nullptr) {
    key = mix(key ^ mix(reinterpret_cast<uintptr_t>(site->file_name())) ^
              (uint64_t{site->line()} << 32 | site->column()));
  }
  CacheLine& line = cache[key % cache.size()];
  if (line.key == key) return line.number;
  Tables& known = tables();
  auto found = known.sites_by_key.find(key);
  if (found == known.sites_by_key.end()) {
    // Far more than a library has of such instructions; past it, places are wrong, no check is.
    const size_t number = std::min<size_t>(known.sites.size(), 0xffff);
    if (number == known.sites.size()) {
      known.sites.push_back({pc, site != nullptr, site ? *site : Site{}});
    }
    found = known.sites_by_key.emplace(key, static_cast<uint16_t>(number)).first;
  }
  line = {key, found->second};
  return line.number;
}

std::vector<Place> site_places(const std::vector<uint16_t>& sites) {
  std::vector<const void*> addresses;
  for (const uint16_t site : sites) addresses.push_back(tables().sites.at(site).pc);
  std::vector<Place> places = find_places(addresses);
  for (size_t i = 0; i < sites.size(); ++i) {
    if (!places[i].empty()) continue;
    const SiteEntry& entry = tables().sites.at(sites[i]);
    Dl_info info{};
    if (entry.has_site) {
      places[i] = {to_string(entry.site)};
    } else if (dladdr(entry.pc, &info) != 0 && info.dli_fname != nullptr) {
      char text[32];
      std::snprintf(text, sizeof text, "+0x%zx",
                    static_cast<size_t>(static_cast<const char*>(entry.pc) -
                                        static_cast<const char*>(info.dli_fbase)));
      places[i] = {base_name(info.dli_fname) + text};
    }
  }
  return places;
}

std::string site_to_string(uint16_t site) { return to_string(site_places({site}).front()); }

}  // namespace emu
