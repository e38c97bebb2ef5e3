#include <algorithm>
#include <cstdlib>
#include <sstream>
#include <unordered_map>

#include "decoder.h"

namespace ptxsim {
namespace {

int round_up(int size, int alignment) { return (size + alignment - 1) / alignment * alignment; }

// ".align 8 .b8 name[144]", in bytes.
struct Declaration {
  std::string name;
  int size = 0, alignment = 0;
};

Declaration read_declaration(const std::string& text) {
  std::istringstream words(text);
  std::string word;
  Declaration d;
  Type type;
  while (words >> word && word[0] == '.') {
    // ".ptr .align 1" is about what a pointer points to.
    if (word == ".ptr") {
      words >> word >> word;
    } else if (word == ".align") {
      words >> d.alignment;
    } else if (word != ".param" && !find_type(word.substr(1), &type)) {
      stop("this declaration is not supported: " + text);
    }
  }
  const size_t bracket = word.find('[');
  d.name = word.substr(0, bracket);
  d.size = type.size * (bracket == word.npos ? 1 : std::atoi(word.c_str() + bracket + 1));
  d.alignment = std::max(d.alignment, static_cast<int>(type.size));
  return d;
}

class Parser {
 public:
  // From the name behind ".entry" on.
  Parser(const std::string& text, size_t begin) : text_(text), at_(begin), names_(&kernel_) {}

  Kernel parse() {
    const size_t open = text_.find('(', at_), close = text_.find(')', open);
    kernel_.name = trim(text_.substr(at_, open - at_));
    for (const std::string& each : split(text_.substr(open + 1, close - open - 1), ',')) {
      parameter(each);
    }
    at_ = text_.find('{', close) + 1;
    line_ = static_cast<int>(std::count(text_.begin(), text_.begin() + at_, '\n')) + 1;
    body();
    finish();
    return std::move(kernel_);
  }

 private:
  const std::string& text_;
  size_t at_;
  int line_ = 0;
  Kernel kernel_;
  Names names_;
  std::unordered_map<std::string, int> labels_;

  void parameter(const std::string& text) {
    const Declaration d = read_declaration(text);
    const int offset = round_up(kernel_.parameters_size, d.alignment);
    kernel_.parameters.push_back({d.size, offset});
    kernel_.parameters_size = offset + d.size;
    names_.declare_symbol(d.name, offset);
  }

  // The statements up to the brace that ends the kernel. Blocks within are not nested scopes: the
  // compiler gives all registers different names.
  void body() {
    std::string statement;
    int blocks = 1;
    // Within "{%r1, %r2}".
    bool in_operand = false;
    for (; at_ < text_.size(); ++at_) {
      const char c = text_[at_];
      if (c == '\n') ++line_;
      if (c == ';') {
        take(trim(statement));
        statement.clear();
      } else if (c == ':' && is_label(trim(statement))) {
        labels_[trim(statement)] = static_cast<int>(kernel_.code.size());
        statement.clear();
      } else if (c == '{' && trim(statement).empty()) {
        ++blocks;
      } else if (c == '}' && !in_operand) {
        if (--blocks == 0) return;
      } else {
        if (c == '{') in_operand = true;
        if (c == '}') in_operand = false;
        statement += c == '\n' ? ' ' : c;
      }
    }
  }

  static bool is_label(const std::string& name) {
    return !name.empty() && name.find_first_of(" \t.[%") == name.npos;
  }

  void take(const std::string& statement) {
    if (statement.empty()) return;
    if (statement[0] == '.') {
      directive(statement);
    } else {
      kernel_.code.push_back(decode(statement, line_, &names_));
    }
  }

  void directive(const std::string& text) {
    if (text.starts_with(".reg")) {
      registers(text);
    } else if (text.starts_with(".shared")) {
      const Declaration d = read_declaration(text.substr(7));
      kernel_.shared_size = round_up(kernel_.shared_size, d.alignment);
      names_.declare_symbol(d.name, kernel_.shared_size);
      kernel_.shared_size += d.size;
    } else if (!text.starts_with(".pragma")) {
      stop("this directive is not supported: " + text);
    }
  }

  // ".reg .b32 %r<40>" or ".reg .b16 low, high".
  void registers(const std::string& text) {
    const std::string list = trim(text.substr(4));
    for (const std::string& each : split(list.substr(list.find_first_of(" \t")), ',')) {
      const size_t angle = each.find('<');
      if (angle == each.npos) {
        names_.declare_register(each);
        continue;
      }
      const int count = std::atoi(each.c_str() + angle + 1);
      for (int n = 0; n < count; ++n) {
        names_.declare_register(each.substr(0, angle) + std::to_string(n));
      }
    }
  }

  void finish() {
    std::vector<Instruction>& code = kernel_.code;
    const bool leaves = !code.empty() && code.back().guard < 0 &&
                        (code.back().op == Op::kReturn || code.back().op == Op::kBranch);
    if (!leaves) stop(kernel_.name + " ends with neither ret nor a branch");
    kernel_.has_label.assign(code.size(), 0);
    for (Instruction& i : code) {
      if (i.op != Op::kBranch) continue;
      const auto found = labels_.find(i.label);
      if (found == labels_.end() || found->second == static_cast<int>(code.size()))
        stop("there is no label " + i.label + " in " + kernel_.name);
      i.target = found->second;
      kernel_.has_label[found->second] = 1;
    }
    kernel_.ran.assign(code.size(), 0);
  }
};

}  // namespace

std::map<std::string, Kernel> parse(const std::string& text) {
  const std::string entry = ".entry";
  std::map<std::string, Kernel> kernels;
  for (size_t at = 0; (at = text.find(entry, at)) != text.npos;) {
    at += entry.size();
    Kernel kernel = Parser(text, at).parse();
    kernels[kernel.name] = std::move(kernel);
  }
  return kernels;
}

}  // namespace ptxsim
