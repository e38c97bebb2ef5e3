#include "decoder.h"

#include <cctype>
#include <cstdlib>
#include <set>

namespace ptxsim {
namespace {

constexpr Type kPredicate{Type::kPredicate, 1}, kAddress{Type::kUnsigned, 8},
    kWord{Type::kUnsigned, 4};

// What a mnemonic may say, besides types and comparisons. Not: ".ftz", ".sat", ".approx" and
// roundings other than to the nearest, which the kernels must not have.
bool is_modifier(const std::string& name) {
  static const std::set<std::string> all{
      // clang-format off
    "rn", "rni", "lo", "hi", "wide", "l", "r", "wrap",
    "global", "shared", "param", "v2", "v4", "to", "uni", "sync", "warp", "bfly", "all", "any",
    "eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu",
      // clang-format on
  };
  return all.count(name);
}

struct Statement {
  std::string text, name;
  std::vector<std::string> modifiers, operands;

  bool has(const std::string& modifier) const { return contains(modifiers, modifier); }
  const std::string& operand(size_t n) const {
    if (n >= operands.size()) refuse();
    return operands[n];
  }
  [[noreturn]] void refuse() const { stop("this PTX is not supported: " + text); }
};

Statement read(const std::string& text) {
  Statement s;
  s.text = text;
  const size_t space = text.find_first_of(" \t");
  s.modifiers = split(text.substr(0, space), '.');
  s.name = s.modifiers.front();
  s.modifiers.erase(s.modifiers.begin());
  if (space != text.npos) s.operands = split(text.substr(space), ',');
  return s;
}

std::vector<std::string> members(const std::string& s) {
  return s[0] == '{' ? split(s.substr(1, s.size() - 2), ',') : std::vector<std::string>{s};
}

class Decoder {
 public:
  Decoder(const Statement& statement, Names* names) : s_(statement), names_(names) {}

  Instruction decode() {
    read_types();
    if (s_.name == "ld" || s_.name == "st") {
      access();
    } else if (s_.name == "bra") {
      i_.op = Op::kBranch;
      i_.label = s_.operand(0);
    } else if (s_.name == "ret") {
      i_.op = Op::kReturn;
    } else if (s_.name == "bar") {
      barrier();
    } else if (s_.name == "shfl") {
      shuffle();
    } else if (s_.name == "vote") {
      vote();
    } else {
      compute();
    }
    return i_;
  }

 private:
  const Statement& s_;
  Names* names_;
  Instruction i_;

  void read_types() {
    int types = 0;
    for (const std::string& modifier : s_.modifiers) {
      Type type;
      if (find_type(modifier, &type)) {
        (types++ ? i_.from : i_.type) = type;
      } else if (!is_modifier(modifier)) {
        s_.refuse();
      }
    }
    if (types > (s_.name == "cvt" ? 2 : 1)) s_.refuse();
  }

  void result(const std::string& name) { i_.results.push_back(names_->result(name)); }
  void operand(const std::string& text, Type type) {
    i_.operands.push_back(names_->operand(text, type));
  }

  // "[%rd1+16]": the register and the offset.
  void address(const std::string& text) {
    const std::string inner = trim(text.substr(1, text.size() - 2));
    const size_t plus = inner.find('+');
    if (plus != inner.npos) i_.offset = std::strtoll(inner.c_str() + plus + 1, nullptr, 0);
    operand(trim(inner.substr(0, plus)), kAddress);
  }

  void access() {
    const bool load = s_.name == "ld";
    // A signed integer would fill its register with its sign.
    if (i_.type.kind == Type::kSigned) s_.refuse();
    if (s_.has("param") && load) {
      i_.op = Op::kLoadParameter;
    } else {
      i_.op = load ? Op::kLoad : Op::kStore;
      i_.space = s_.has("shared") ? Space::kShared : Space::kGlobal;
      if (!s_.has("shared") && !s_.has("global")) s_.refuse();
    }
    address(s_.operand(load ? 1 : 0));
    const std::vector<std::string> values = members(s_.operand(load ? 0 : 1));
    for (const std::string& each : values) load ? result(each) : operand(each, i_.type);
    const size_t width = s_.has("v2") ? 2 : s_.has("v4") ? 4 : 1;
    if (values.size() != width) s_.refuse();
  }

  void barrier() {
    if (s_.has("warp")) {
      i_.op = Op::kWarpBarrier;
      operand(s_.operand(0), kWord);
    } else {
      i_.op = Op::kBlockBarrier;
      if (!s_.has("sync") || s_.operands != std::vector<std::string>{"0"}) s_.refuse();
    }
  }

  // The first operand of a shuffle or vote is made that of the lanes that take part.
  void shuffle() {
    i_.op = Op::kShuffle;
    i_.type = {Type::kBits, 4};
    if (!s_.has("bfly")) s_.refuse();
    for (const std::string& each : split(s_.operand(0), '|')) result(each);
    for (const size_t n : {4, 1, 2, 3}) operand(s_.operand(n), kWord);
  }

  void vote() {
    i_.op = Op::kVote;
    i_.any = s_.has("any");
    if (s_.has("any") == s_.has("all")) s_.refuse();
    result(s_.operand(0));
    operand(s_.operand(2), kWord);
    operand(s_.operand(1), kPredicate);
  }

  void compute() {
    if (s_.name == "mov") {
      for (const std::string& each : members(s_.operand(0))) result(each);
      const std::vector<std::string> parts = members(s_.operand(1));
      Type type = i_.type;
      type.size = static_cast<uint8_t>(type.size / parts.size());
      for (const std::string& each : parts) operand(each, type);
    } else {
      result(s_.operand(0));
      const Type type = s_.name == "cvt" ? i_.from : i_.type;
      for (size_t n = 1; n < s_.operands.size(); ++n) {
        operand(s_.operands[n], n == 3 && s_.name == "selp" ? kPredicate : type);
      }
    }
    i_.compute = find_compute(s_.name, s_.modifiers, i_);
    if (!i_.compute) s_.refuse();
    i_.computes_double = computes_double();
  }

  // Changes of sign are part of the instruction that takes the value.
  bool computes_double() const {
    const auto is_double = [](Type type) { return type.kind == Type::kFloat && type.size == 8; };
    return (is_double(i_.type) || is_double(i_.from)) &&
           !contains({"mov", "selp", "neg", "abs"}, s_.name);
  }
};

}  // namespace

bool find_type(const std::string& name, Type* type) {
  static const std::map<std::string, Type> all{
      {"pred", kPredicate},
      {"b8", {Type::kBits, 1}},
      {"b16", {Type::kBits, 2}},
      {"b32", {Type::kBits, 4}},
      {"b64", {Type::kBits, 8}},
      {"u8", {Type::kUnsigned, 1}},
      {"u16", {Type::kUnsigned, 2}},
      {"u32", {Type::kUnsigned, 4}},
      {"u64", {Type::kUnsigned, 8}},
      {"s16", {Type::kSigned, 2}},
      {"s32", {Type::kSigned, 4}},
      {"s64", {Type::kSigned, 8}},
      {"f16", {Type::kFloat, 2}},
      {"f32", {Type::kFloat, 4}},
      {"f64", {Type::kFloat, 8}},
      {"f16x2", {Type::kFloat, 2, 2}},
      {"bf16x2", {Type::kBFloat, 2, 2}},
  };
  const auto found = all.find(name);
  if (found == all.end()) return false;
  *type = found->second;
  return true;
}

void Names::declare_register(const std::string& name) {
  if (!registers_.count(name)) registers_[name] = new_register();
}

int Names::result(const std::string& name) {
  const auto found = registers_.find(name);
  if (found == registers_.end()) stop("the register " + name + " is not declared");
  return found->second;
}

int Names::constant(uint64_t value) {
  const auto found = constants_.find(value);
  if (found != constants_.end()) return found->second;
  const int number = constants_[value] = new_register();
  kernel_->constants.push_back({number, value});
  return number;
}

int Names::operand(const std::string& text, Type type) {
  const auto found = registers_.find(text);
  if (found != registers_.end()) return found->second;
  if (text[0] == '%') {
    declare_register(text);
    kernel_->specials.push_back({registers_[text], text});
    return registers_[text];
  }
  const auto symbol = symbols_.find(text);
  if (symbol != symbols_.end()) return constant(static_cast<uint64_t>(symbol->second));
  // The bits of a float or double.
  const char kind =
      text.size() > 2 && text[0] == '0' ? static_cast<char>(std::tolower(text[1])) : 0;
  if (kind == 'f' || kind == 'd') return constant(std::strtoull(text.c_str() + 2, nullptr, 16));
  if (text[0] != '-' && !std::isdigit(text[0])) stop("the operand " + text + " is unknown");
  const uint64_t value = text[0] == '-'
                             ? static_cast<uint64_t>(std::strtoll(text.c_str(), nullptr, 0))
                             : std::strtoull(text.c_str(), nullptr, 0);
  if (type.kind == Type::kPredicate) return constant(value != 0);
  return constant(type.size == 8 ? value : value & ((uint64_t{1} << (8 * type.size)) - 1));
}

Instruction decode(const std::string& statement, int line, Names* names) {
  std::string text = statement;
  int guard = -1;
  if (text[0] == '@') {
    const size_t space = text.find_first_of(" \t");
    guard = names->operand(text.substr(1, space - 1), kPredicate);
    text = trim(text.substr(space));
  }
  Instruction i = Decoder(read(text), names).decode();
  i.guard = guard;
  i.text = statement;
  i.line = line;
  return i;
}

}  // namespace ptxsim
