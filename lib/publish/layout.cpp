#include "publish/layout.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace vmem::publish {

using core::error;
using core::Status;

namespace {

constexpr size_t kCovered = offsetof(Header, checksum) + sizeof(uint64_t);  // the checksum covers the bytes after it

// FNV-1a over words: detects torn files, not attacks.
uint64_t checksum(std::span<const std::byte> bytes) {
  uint64_t h = 0xcbf29ce484222325u;
  for (size_t i = 0; i + 8 <= bytes.size(); i += 8) {
    uint64_t word;
    memcpy(&word, bytes.data() + i, 8);
    h = (h ^ word) * 0x100000001b3u;
    h ^= h >> 32;
  }
  return h;
}

template <size_t N>
void end_text(char (&text)[N]) {
  text[N - 1] = '\0';
}

}  // namespace

void put_text(std::span<char> to, std::string_view from) {
  const size_t n = std::min(from.size(), to.size() - 1);
  memcpy(to.data(), from.data(), n);
  memset(to.data() + n, 0, to.size() - n);
}

void pack(Snapshot& snapshot, std::vector<std::byte>* out) {
  Header& h = snapshot.header;
  snapshot.devices.resize(std::min(snapshot.devices.size(), kMaxDevices));
  snapshot.regions.resize(std::min(snapshot.regions.size(), kMaxRegions));
  memcpy(h.magic, kMagic, sizeof h.magic);
  h.version = kVersion;
  h.header_bytes = sizeof(Header);
  h.device_bytes = sizeof(Device);
  h.region_bytes = sizeof(Region);
  h.devices = static_cast<uint32_t>(snapshot.devices.size());
  h.regions = static_cast<uint32_t>(snapshot.regions.size());
  const size_t devices = h.devices * sizeof(Device), regions = h.regions * sizeof(Region);
  h.bytes = sizeof(Header) + devices + regions;
  out->resize(h.bytes);
  memcpy(out->data(), &h, sizeof h);
  if (devices != 0) memcpy(out->data() + sizeof h, snapshot.devices.data(), devices);
  if (regions != 0) memcpy(out->data() + sizeof h + devices, snapshot.regions.data(), regions);
  h.checksum = checksum(std::span(*out).subspan(kCovered));
  memcpy(out->data() + offsetof(Header, checksum), &h.checksum, sizeof h.checksum);
}

Status unpack(std::span<const std::byte> bytes, Snapshot* out) {
  if (bytes.empty() || bytes[0] == std::byte{0}) return error(EAGAIN, "nothing has been written yet");
  Header h{};
  if (bytes.size() < kCovered) return error(EINVAL, "%zu bytes are no publication of libvmem", bytes.size());
  memcpy(&h, bytes.data(), std::min(bytes.size(), sizeof h));
  if (memcmp(h.magic, kMagic, sizeof h.magic) != 0) return error(EINVAL, "this is no publication of libvmem");
  if (h.version != kVersion) {
    return error(EPROTO, "the process publishes version %u, this program reads version %u: use the one of its libvmem",
                 h.version, kVersion);
  }
  if (bytes.size() < sizeof h) return error(EAGAIN, "%zu bytes of a header of %zu", bytes.size(), sizeof h);
  if (h.header_bytes != sizeof h || h.device_bytes != sizeof(Device) || h.region_bytes != sizeof(Region) ||
      h.devices > kMaxDevices || h.regions > kMaxRegions) {
    return error(EINVAL, "its header contradicts itself: %u devices of %u bytes, %u regions of %u bytes", h.devices,
                 h.device_bytes, h.regions, h.region_bytes);
  }
  const size_t devices = h.devices * sizeof(Device), regions = h.regions * sizeof(Region);
  // A torn file may seem too short at first.
  if (h.bytes != sizeof h + devices + regions || h.bytes > bytes.size())
    return error(EAGAIN, "%zu bytes where %zu are needed", bytes.size(), sizeof h + devices + regions);
  if (checksum(bytes.first(h.bytes).subspan(kCovered)) != h.checksum) return error(EAGAIN, "it is being rewritten");
  end_text(h.command);
  end_text(h.library);
  end_text(h.trap);
  end_text(h.device_tier);
  out->header = h;
  out->devices.resize(h.devices);
  out->regions.resize(h.regions);
  if (devices != 0) memcpy(out->devices.data(), bytes.data() + sizeof h, devices);
  if (regions != 0) memcpy(out->regions.data(), bytes.data() + sizeof h + devices, regions);
  for (Device& d : out->devices) end_text(d.name);
  for (Region& r : out->regions) {
    end_text(r.name);
    r.backing = std::min<uint32_t>(r.backing, std::size(kBackingNames) - 1);
  }
  return {};
}

}  // namespace vmem::publish
