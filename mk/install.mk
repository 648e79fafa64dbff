# install.mk: make install, make uninstall, make dist, and make compile_commands.json for clangd.

PREFIX ?= /usr/local
INSTALLED := train_gpt2 $(if $(CUDA_WANTED),train_gpt2cu)

.PHONY: install uninstall dist compile_commands.json

# The program, its licence, and the man page and completions, which are made from its --help.
install: $(INSTALLED)
	install -d $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/share/doc/train_gpt2 $(DESTDIR)$(PREFIX)/share/man/man1
	install -d $(DESTDIR)$(PREFIX)/share/train_gpt2
	install -m 644 scripts/table_rows.py $(DESTDIR)$(PREFIX)/share/train_gpt2/
	install -d $(DESTDIR)$(PREFIX)/share/bash-completion/completions $(DESTDIR)$(PREFIX)/share/zsh/site-functions
	install -m 755 $(foreach p,$(INSTALLED),$(realpath $(p)) ) $(DESTDIR)$(PREFIX)/bin/
	install -m 644 LICENSE README.md $(DESTDIR)$(PREFIX)/share/doc/train_gpt2/
	scripts/from_help.sh man ./train_gpt2 $(VERSION) >$(DESTDIR)$(PREFIX)/share/man/man1/train_gpt2.1
	scripts/from_help.sh bash ./train_gpt2 $(INSTALLED) >$(DESTDIR)$(PREFIX)/share/bash-completion/completions/train_gpt2
	scripts/from_help.sh zsh ./train_gpt2 $(INSTALLED) >$(DESTDIR)$(PREFIX)/share/zsh/site-functions/_train_gpt2

uninstall:
	rm -rf $(DESTDIR)$(PREFIX)/share/doc/train_gpt2 $(DESTDIR)$(PREFIX)/share/train_gpt2
	rm -f $(addprefix $(DESTDIR)$(PREFIX)/bin/,train_gpt2 train_gpt2cu) $(DESTDIR)$(PREFIX)/share/man/man1/train_gpt2.1 \
	      $(DESTDIR)$(PREFIX)/share/bash-completion/completions/train_gpt2 \
	      $(DESTDIR)$(PREFIX)/share/zsh/site-functions/_train_gpt2

# An archive of the last commit.
dist:
	git archive --prefix=train_gpt2-$(VERSION)/ --output=train_gpt2-$(VERSION).tar.gz HEAD
	@echo "train_gpt2-$(VERSION).tar.gz"

compile_commands.json:
	@$(MAKE) --no-print-directory --always-make --dry-run V=1 CUDA=0 all tests bench | awk -v folder="$(CURDIR)" ' \
	    / -c .* -o / { source = $$0; sub(/.* -c /, "", source); sub(/ .*/, "", source); gsub(/["\\]/, "\\\\&"); \
	        printf "%s{\"directory\": \"%s\", \"file\": \"%s\", ", n++ ? ",\n" : "[\n", folder, source; \
	        printf "\"command\": \"%s\"}", $$0 } \
	    END { print "\n]" }' >$@
	@echo "$@"
