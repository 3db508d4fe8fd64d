#include "store/engine.h"

#include <cerrno>
#include <iterator>
#include <string>

#include "core/log.h"
#include "core/options.h"
#include "store/codec.h"
#include "store/file.h"
#include "store/transfer.h"

namespace vmem::store {

namespace {

constexpr bool in_order() {
  for (size_t i = 0; i < std::size(kEngines); ++i)
    if (static_cast<size_t>(kEngines[i].kind) != i) return false;
  return true;
}
static_assert(in_order());

}  // namespace

void renew_in_child() {
  renew_flags_lock();
  renew_codec();
  leave_parents_files();
}

EngineKind engine_kind(std::string_view name) {
  for (const EngineEntry& entry : kEngines)
    if (entry.name == name) return entry.kind;
  return EngineKind::automatic;
}

core::Status make_engine(const EngineOptions& options, std::unique_ptr<Engine>* out) {
  return kEngines[static_cast<size_t>(options.kind)].make(options, out);
}

core::Status make_first_engine(const EngineOptions& options, std::unique_ptr<Engine>* out) {
  for (const EngineEntry* entry = std::begin(kEngines) + 1;; ++entry) {
    core::Status status = entry->make(options, out);
    if (status.ok() || entry + 1 == std::end(kEngines)) return status;
    VMEM_LOG_ONCE(core::Level::warning, "I/O goes through %s, which is slower: %s. %s.", entry[1].name.data(),
                  status.text().data(), entry->advice(-status.code()));
  }
}

}  // namespace vmem::store

namespace vmem::core {

std::string io_engine_choices() {
  std::string names;
  for (const store::EngineEntry& entry : store::kEngines) names += (names.empty() ? "" : "|") + std::string(entry.name);
  return names;
}

}  // namespace vmem::core
