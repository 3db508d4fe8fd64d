// Changes a block's entry directly, past BlockTable's named changes: tests bring blocks into states
// this way.
#pragma once

#include "pager/block/block_table.h"

namespace vmem::core {

struct BlockTableEditor {
  static Block& entry(BlockTable& table, BlockIndex i) { return table.table_[i]; }
  static void change(BlockTable& table, BlockIndex i, State from, State to) {
    table.change(i, static_cast<uint16_t>(1u << static_cast<unsigned>(from)), to);
  }
};

// Found by the arguments' namespace.
inline Block& edit(BlockTable& table, BlockIndex i) {
  return BlockTableEditor::entry(table, i);
}
inline void change(BlockTable& table, BlockIndex i, State from, State to) {
  BlockTableEditor::change(table, i, from, to);
}

}  // namespace vmem::core
